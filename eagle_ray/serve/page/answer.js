// One turn on the page: a question, the answer's tokens by how they came, a column for each pass, and the figures.

export const DEEPEST = 8; // colours there are

export class Turn {
  constructor(question, parent) {
    this.question = question;
    this.article = document.getElementById("turn").content.firstElementChild.cloneNode(true);
    [this.text, this.strip, this.figure, this.trouble] = [".text", ".strip", "figure", ".trouble"].map((name) => this.find(name));
    this.find(".question").textContent = question;
    parent.append(this.article);
  }

  find(selector) {
    return this.article.querySelector(selector);
  }

  get answer() {
    return this.text.textContent;
  }

  begin() {
    this.text.replaceChildren();
    this.text.classList.remove("whole", "cut");
    this.strip.replaceChildren();
    this.trouble.hidden = this.figure.hidden = true;
    this.article.setAttribute("aria-busy", "true");
    this.tokens = this.accepted = 0;
    this.passes = -1; // the prompt's own is none of them
    this.seen = "";
    this.isCode = false;
    this.reason = null;
    this.asked = performance.now();
  }

  take(chunk) {
    this.reason = chunk.choices[0]?.finish_reason ?? this.reason;
    const steps = chunk.choices[0]?.steps ?? [];
    if (!steps.length) return;
    this.last = performance.now();
    if (!this.tokens) this.first = this.last;
    for (const step of steps) this.add(step);
    this.figure.hidden = false;
    this.tell();
  }

  end() {
    this.article.setAttribute("aria-busy", "false");
    this.text.classList.add(this.reason === "stop" ? "whole" : "cut");
  }

  fail(message, again) {
    this.article.setAttribute("aria-busy", "false");
    this.trouble.firstElementChild.textContent = message;
    this.trouble.lastElementChild.onclick = again;
    this.trouble.hidden = false;
  }

  add(step) {
    let column = this.strip.lastElementChild;
    if (column?.dataset.step !== String(step.step)) {
      column = this.strip.appendChild(document.createElement("span"));
      column.dataset.step = step.step;
      column.dataset.said = said(step);
      this.passes += 1;
      this.accepted += step.num_accepted_draft_tokens;
    }
    for (const token of step.tokens) {
      const kind = step.step ? `d${Math.min(token.depth, DEEPEST)}` : "first";
      column.appendChild(document.createElement("i")).className = kind;
      this.text.append(this.word(token, step, kind));
    }
    this.tokens += step.tokens.length;
  }

  word(token, step, kind) {
    const word = document.createElement("span");
    word.className = `came ${kind}`;
    word.textContent = token.text;
    word.tabIndex = -1;
    Object.assign(word.dataset, { step: step.step, depth: token.depth, id: token.id });
    const wasCode = this.isCode;
    this.seen += token.text;
    this.isCode = this.seen.split("```").length % 2 === 0;
    word.classList.toggle("code", wasCode || this.isCode);
    return word;
  }

  tell() {
    const tau = this.passes ? 1 + this.accepted / this.passes : null;
    const seconds = (this.last - this.first) / 1000;
    const facts = {
      ".tau": tau?.toFixed(2),
      ".speed": seconds > 0 ? ((this.tokens - 1) / seconds).toFixed(0) : undefined,
      ".first-token": (this.first - this.asked).toFixed(0),
      ".tokens": this.tokens,
      ".passes": this.passes,
    };
    for (const [name, value] of Object.entries(facts)) this.find(name).textContent = value ?? "–";
    this.strip.parentElement.style.setProperty("--tau", tau ?? 1);
    this.strip.ariaLabel = `${this.tokens} tokens in ${this.passes} passes, one column for each`;
    this.strip.scrollLeft = this.strip.scrollWidth;
  }
}

function said(step) {
  if (!step.step) return "the prompt’s pass";
  const drafts = step.num_draft_tokens;
  return `pass ${step.step}: ${drafts ? `${step.num_accepted_draft_tokens} of ${drafts} drafted tokens accepted` : "nothing drafted"}`;
}
