// Keeps the status of a federation up to date, above its report.
"use strict";

(async () => {
  let shown = null;
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, 2000));
    const place = document.getElementById("federation-status");
    try {
      const answer = await fetch("federation", { cache: "no-store" });
      const html = await answer.text();
      if (!answer.ok) throw new Error(html);
      if (html !== shown) place.innerHTML = html; // rendered by the server, which escapes all names
      shown = html;
    } catch (error) {
      const state = document.getElementById("state");
      state.textContent = `not known: ${error.message}`;
      state.className = "bad";
      shown = null;
    }
  }
})();
