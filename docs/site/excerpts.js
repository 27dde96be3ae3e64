// Below each result of a search: the words around the first place where the page has one of those searched for.
// PAGE_TEXTS is page_texts.js. Nothing is fetched, so it works from disk.
document.addEventListener("DOMContentLoaded", () => {
  const results = document.getElementById("search-results");
  const query = new URLSearchParams(location.search).get("q") || "";
  const words = query.split(/[^\p{L}\p{N}_]+/u).filter((word) => word.length > 1).map((word) => word.toLowerCase());
  if (!results || !words.length) return;
  const root = new URL(document.documentElement.dataset.content_root, location.href).href;

  const textOf = (link) => {
    const page = link.href.slice(root.length).replace(/[?#].*$/, "").replace(/\.html$/, "");
    return PAGE_TEXTS[decodeURIComponent(page)] || "";
  };

  const excerpt = (text) => {
    const lower = text.toLowerCase();
    const places = words.map((word) => lower.indexOf(word)).filter((place) => place >= 0);
    const begin = places.length ? Math.max(0, Math.min(...places) - 100) : 0;
    const shown = text.slice(begin, begin + 240);
    const paragraph = document.createElement("p");
    paragraph.className = "context";
    paragraph.append(begin ? "\u2026" : "");
    const pattern = new RegExp(`(${words.join("|")})`, "gi"); // words are letters, digits and _
    shown.split(pattern).forEach((part, number) => {
      const piece = number % 2 ? document.createElement("mark") : document.createTextNode(part);
      if (number % 2) piece.textContent = part;
      paragraph.append(piece);
    });
    paragraph.append(begin + 240 < text.length ? "\u2026" : "");
    return paragraph;
  };

  const add = () => {
    for (const item of results.querySelectorAll("li")) {
      const link = item.querySelector("a");
      if (!link || item.querySelector("p.context") || item.querySelector("span")) continue;
      const text = textOf(link);
      if (text) item.append(excerpt(text));
    }
  };
  new MutationObserver(add).observe(results, { childList: true, subtree: true });
  add();
});
