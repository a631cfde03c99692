"""What a person might ask about something documented.

`{name}` is what it is called, `{kind}` what it is, `{text}` its documentation; "|" begins the user's next turn.
"""

# By category, and by the kinds of subject that are asked about in these ways.
TEMPLATES: dict[str, dict[str, tuple[str, ...]]] = {
    "explain": {
        "function method": (
            "What does {name} do?",
            "Explain {name} in plain words.",
            "When would I use {name}?",
            "What is {name} for? Answer in two or three sentences.",
            "Explain what {name} does to someone who has just started with Python.",
            "I found {name} in some code that I have to maintain. What does it do?",
            "What should I know before I use {name}?",
        ),
        "class attribute": (
            "What is the {kind} {name} for?",
            "Explain the {kind} {name} in plain words.",
            "When would I use the {kind} {name}?",
            "Explain the {kind} {name} in one or two sentences.",
            "I came across the {kind} {name}. What should I know about it?",
        ),
        "topic": (
            "Explain this topic of the Python language reference in plain words: {name}.",
            "I am learning Python. What should I know about this topic: {name}?",
            "Give me a short introduction to this part of the Python language, with an example: {name}.",
        ),
    },
    "example": {
        "function method class": (
            "Write a short example that uses {name}.",
            "Show me how to use {name} in a small program, with comments.",
            "Give two examples of {name}: a simple one and a realistic one.",
            "Write a small Python script in which {name} is useful.",
            "Show an example of {name}, together with the output that it prints.",
        )
    },
    "test": {
        "function method": (
            "Write three pytest tests for {name}.",
            "How would you test code that calls {name}? Show the tests with pytest.",
            "Write a test that shows what {name} does with unusual input.",
            "Which edge cases of {name} are worth a test? Write one test for each.",
        )
    },
    "error": {
        "error": (
            "When does Python report {name}?",
            "My program ends with {name}. What are the usual reasons?",
            "How do I handle {name} properly?",
            "Give an example of code that leads to {name}, and show how to deal with it.",
        )
    },
    "rewrite": {
        "function method class attribute error topic": (
            "Make this description of {name} shorter without losing anything important:\n\n{text}",
            "Rewrite this description of {name} in one short sentence:\n\n{text}",
            "Rewrite this so that a beginner understands it. It describes {name}.\n\n{text}",
        )
    },
    "summarise": {
        "function method class attribute error topic": (
            "Summarise this documentation of {name} in one sentence:\n\n{text}",
            "Summarise what this says about {name} in two or three bullet points:\n\n{text}",
            "Read this text about {name} and tell me the most important thing in it.\n\n{text}",
        )
    },
    "chat": {
        "function method": (
            "What does {name} do?|Show me a short example.|Now write a test for that example.",
            "How do I use {name}?|What are common mistakes with it?",
            "Explain {name} to me.|Can you say that in simpler words?|Which alternatives are there?",
            "Write a small function that uses {name}.|Add type hints and a docstring.|Now write two tests for it.",
        ),
        "class attribute": (
            "What is the {kind} {name} for?|Show me how to use it.|What are common mistakes with it?",
            "Explain the {kind} {name} to me.|Can you say that in simpler words?",
            "When would I use the {kind} {name}?|Show me an example.|Explain it line by line.",
        ),
        "error": (
            "My program ends with {name}. What does that mean?|Show me a short piece of code that leads to it.",
            "What is {name}?|How do I catch it?|And when is it better not to catch it?",
        ),
        "topic": (
            "Explain this topic of the Python language to me: {name}.|Show me an example.|What do people get wrong?",
            "Teach me about this part of the Python language: {name}.|Give me a small exercise.|Now show the solution.",
        ),
    },
}
WORDS = {"rewrite": 14, "summarise": 40}  # of a text, from which on that can be asked
COMPARE = (
    "What is the difference between {a} and {b}?",
    "When should I use {a}, and when {b}?",
    "Compare {a} with {b}, and show a short example of each.",
    "Can I use {a} in the place of {b}? Explain why, or why not.",
)
