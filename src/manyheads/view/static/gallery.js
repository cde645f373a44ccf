const page = document.documentElement;
document.getElementById("language").addEventListener("click", () => {
  page.dataset.language = page.lang = page.dataset.language === "zh" ? "en" : "zh";
});
