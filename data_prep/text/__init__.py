"""Text from its sources to rows of tokens: records, chat templates, packing, prompts."""
