// Runs before anything is painted: the theme that the reader chose last time, else that of the system.
"use strict";

(function () {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = "system";
  try { // A page opened from a file may not be allowed to remember.
    chosen = localStorage.getItem("fedalign-theme") ?? chosen;
  } catch (error) {
    console.debug("no theme is remembered:", error.message);
  }
  window.applyTheme = (theme) => {
    chosen = theme;
    root.dataset.chosen = theme;
    root.dataset.theme = theme === "system" ? (dark.matches ? "dark" : "light") : theme;
  };
  dark.addEventListener("change", () => window.applyTheme(chosen));
  window.applyTheme(["light", "dark"].includes(chosen) ? chosen : "system");
})();
