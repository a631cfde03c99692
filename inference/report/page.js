"use strict";
// Texts come from models. They are put into the page as text, never as markup.
const rounds = document.getElementById("rounds");
if (rounds) {
  const { trees, pieces } = JSON.parse(rounds.textContent);
  const prompt = document.getElementById("choose-prompt");
  const method = document.getElementById("choose-method");
  const panel = document.getElementById("tree");

  const make = (name, kind, text) => {
    const made = document.createElement(name);
    if (kind) made.className = kind;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const visible = (text) => (text === "" ? "∅" : text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣"));
  const say = (token) => visible(pieces[token] ?? String(token));

  const branch = ([tokens, parents, path, own], node, last) => {
    const list = make("ul");
    parents.forEach((parent, child) => {
      if (parent !== node) return;
      const item = make("li");
      item.append(make("span", path.includes(child) ? "accepted" : "rejected", say(tokens[child])));
      item.append(branch([tokens, parents, path, own], child, last));
      list.append(item);
    });
    if (node === last) {
      for (const token of own) {
        const item = make("li");
        item.append(make("span", "own", say(token)));
        list.append(item);
      }
    }
    return list;
  };

  const show = (span) => {
    document.querySelectorAll(".round.chosen").forEach((other) => other.classList.remove("chosen"));
    span.classList.add("chosen");
    const number = Number(span.dataset.round);
    const tree = trees[span.closest(".shown").dataset.text][number];
    const [tokens, , path] = tree;
    panel.replaceChildren(make("h3", "", number ? `Round ${number}: ${tokens.length} drafted, ${path.length} accepted` : "The prefill"));
    if (number && !tokens.length) panel.append(make("p", "", "Nothing was drafted here, or the tree was not kept."));
    const top = make("div", "branches");
    top.append(branch(tree, -1, path.length ? path[path.length - 1] : -1));
    panel.append(top);
    panel.scrollIntoView({ block: "nearest" });
  };

  const choose = () => {
    const name = `${prompt.value}/${method.value}`;
    document.querySelectorAll(".shown").forEach((one) => (one.hidden = one.dataset.text !== name));
    document.querySelectorAll(".asked").forEach((one) => (one.hidden = one.dataset.prompt !== prompt.value));
  };

  document.addEventListener("click", (event) => {
    const span = event.target.closest?.(".round");
    if (span) show(span);
  });
  document.addEventListener("keydown", (event) => {
    const span = event.target.closest?.(".round");
    if (span && (event.key === "Enter" || event.key === " ")) {
      event.preventDefault();
      show(span);
    }
  });
  document.getElementById("rejected").addEventListener("change", (event) => {
    document.body.classList.toggle("without-rejected", !event.target.checked);
  });
  prompt.addEventListener("change", choose);
  method.addEventListener("change", choose);
  choose();
}
