// The page: what is asked, what the server is told, who is being answered, and the words about one token.

import { DEEPEST, Turn } from "./answer.js";
import { asked, chunksOf } from "./stream.js";

const by = (id) => document.getElementById(id);
const [question, send, settings, talk, tip] = ["question", "send", "settings", "talk", "tip"].map(by);
const form = settings.querySelector("form");
const turns = [];
let current = null; // the AbortController of the answer that is coming

async function greet() {
  try {
    const [model] = (await (await asked("v1/models", form.key.value)).json()).data;
    by("model").textContent = model.id;
    by("model").classList.remove("bad");
    explain(model.num_spec_tokens);
  } catch (error) {
    by("model").textContent = error.message;
    by("model").classList.add("bad");
    settings.open ||= error.status === 401;
  }
}

// The depths that this engine drafts to, in their colours; what is deeper than these has the last one.
function explain(deepest) {
  const depths = by("depths");
  depths.hidden = !deepest;
  depths.querySelectorAll("i").forEach((depth) => depth.remove());
  for (let depth = 1; depth <= Math.min(deepest, DEEPEST); depth++) {
    const textContent = depth === DEEPEST && deepest > DEEPEST ? `${depth}+` : depth;
    depths.append(Object.assign(document.createElement("i"), { className: `came d${depth}`, textContent }));
  }
}

function request(turn) {
  const system = form.system.value.trim();
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const past of turns) {
    if (past === turn) break;
    if (past.answer) messages.push({ role: "user", content: past.question }, { role: "assistant", content: past.answer });
  }
  messages.push({ role: "user", content: turn.question });
  const own = ["temperature", "max_tokens", "seed"].filter((name) => form[name].value !== "");
  const sampling = Object.fromEntries(own.map((name) => [name, form[name].valueAsNumber]));
  return { messages, stream: true, stream_options: { include_steps: true }, ...sampling };
}

async function answer(turn) {
  if (!form.reportValidity()) return;
  current = new AbortController();
  send.textContent = "Stop";
  turn.begin();
  tip.hidden = true;
  follow(true);
  try {
    for await (const chunk of chunksOf(request(turn), form.key.value, current.signal)) {
      const wasLow = isLow();
      turn.take(chunk);
      follow(wasLow);
    }
    turn.end();
  } catch (error) {
    if (error.name === "AbortError") turn.end();
    else refused(turn, error);
  } finally {
    current = null;
    send.textContent = "Send";
  }
}

function refused(turn, error) {
  turn.fail(error.message, () => current || answer(turn));
  follow(true);
  if (error.status === 401) {
    settings.open = true;
    form.key.focus();
  }
}

function ask(text) {
  if (!text.trim() || current) return;
  by("welcome").hidden = true;
  by("new").hidden = false;
  question.value = "";
  turns.push(new Turn(text, talk));
  answer(turns.at(-1));
}

const isLow = () => innerHeight + scrollY >= document.body.scrollHeight - 40;
const follow = (wasLow) => wasLow && scrollTo(0, document.body.scrollHeight);

by("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (current) current.abort();
  else ask(question.value);
});
question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!current) ask(question.value);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") current?.abort();
});
by("welcome").addEventListener("click", (event) => event.target.matches(".example") && ask(event.target.textContent));
by("new").addEventListener("click", () => {
  current?.abort();
  turns.length = 0;
  talk.replaceChildren();
  by("welcome").hidden = false;
  by("new").hidden = true;
  question.focus();
});

// Settings outlive the page; a key lives as long as its tab.
const store = (name) => (name === "key" ? sessionStorage : localStorage);
for (const field of form.elements) field.value = store(field.name).getItem(`eagle_ray.${field.name}`) ?? "";
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("change", (event) => {
  store(event.target.name).setItem(`eagle_ray.${event.target.name}`, event.target.value);
  if (event.target.name === "key") greet();
});

function point(target) {
  const turn = target.closest("article");
  for (const lit of document.querySelectorAll(".lit")) lit.classList.remove("lit");
  const step = turn && target.closest("[data-step]");
  tip.hidden = !step || turn.ariaBusy === "true"; // an answer that comes under a resting pointer is not covered
  if (!step) return;
  for (const part of turn.querySelectorAll(`[data-step="${step.dataset.step}"]`)) part.classList.add("lit");
  const column = turn.querySelector(`.strip [data-step="${step.dataset.step}"]`);
  tip.replaceChildren(...[words(step.dataset), column.dataset.said].filter(Boolean).map(paragraph));
  const box = step.getClientRects()[0];
  const left = Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
  const above = box.top - tip.offsetHeight - 6;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${above < 8 ? box.bottom + 6 : above}px`;
}

function words({ step, depth, id }) {
  if (id === undefined) return "";
  const how = depth > 0 ? `accepted at depth ${depth}` : "the model’s own";
  return `${step > 0 ? how : "the prompt’s first token"} · token ${id}`;
}

function paragraph(text) {
  return Object.assign(document.createElement("p"), { textContent: text });
}

for (const kind of ["pointerover", "focusin"]) document.addEventListener(kind, (event) => point(event.target));
document.addEventListener("scroll", () => (tip.hidden = true), { passive: true });

const MOVES = { ArrowRight: 1, ArrowLeft: -1 };
talk.addEventListener("keydown", (event) => {
  const text = event.target.closest(".text");
  if (!text || !(event.key in MOVES)) return;
  event.preventDefault();
  const words = [...text.children];
  const next = words.indexOf(event.target) + MOVES[event.key];
  words[Math.max(0, Math.min(words.length - 1, next))]?.focus();
});

greet();
