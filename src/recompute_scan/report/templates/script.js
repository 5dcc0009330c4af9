"use strict";
(function () {
  // The page reads whole without any of this. The theme is set before anything is painted.
  var root = document.documentElement;
  function remembered() {
    try { return localStorage.getItem("recompute-scan-theme"); } catch (error) { return null; }
  }
  function wear(theme) {
    if (theme === "dark" || theme === "light") { root.setAttribute("data-theme", theme); }
  }
  wear(remembered());

  function isDark() {
    var theme = root.getAttribute("data-theme");
    return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }
  function turnTheme() {
    var theme = isDark() ? "light" : "dark";
    wear(theme);
    try { localStorage.setItem("recompute-scan-theme", theme); } catch (error) { /* not kept */ }
  }

  function openAll(open) {
    document.querySelectorAll("details").forEach(function (box) { box.open = open; });
  }
  function openTarget() {
    var place = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (var box = place; box; box = box.parentElement) {
      if (box.tagName === "DETAILS") { box.open = true; }
    }
    if (place) { place.scrollIntoView(); }
  }

  var clearing = 0;
  function say(text) {
    var line = document.querySelector(".said");
    line.textContent = text;
    clearTimeout(clearing);
    clearing = setTimeout(function () { line.textContent = ""; }, 2500);
  }
  function select(block) {
    var range = document.createRange();
    range.selectNodeContents(block);
    var selection = getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
  }
  function copyByHand(block) {
    select(block);
    var done = false;
    try { done = document.execCommand("copy"); } catch (error) { done = false; }
    say(done ? "Copied" : "Selected: press Ctrl+C to copy");
  }
  function copy(block) {
    if (!navigator.clipboard) { copyByHand(block); return; }
    navigator.clipboard.writeText(block.textContent).then(
      function () { say("Copied"); },
      function () { copyByHand(block); }
    );
  }

  document.addEventListener("DOMContentLoaded", function () {
    document.querySelectorAll(".tools, .copy").forEach(function (item) { item.hidden = false; });
    var allOpen = false;
    document.addEventListener("click", function (event) {
      var button = event.target.closest("button");
      if (!button) { return; }
      if (button.dataset.copy) { copy(document.getElementById(button.dataset.copy)); }
      if (button.dataset.do === "theme") { turnTheme(); }
      if (button.dataset.do === "expand") {
        allOpen = !allOpen;
        openAll(allOpen);
        button.textContent = allOpen ? "Close all" : "Open all";
      }
    });
    if (location.hash) { openTarget(); }
  });
  window.addEventListener("hashchange", openTarget);

  var closed = [];
  window.addEventListener("beforeprint", function () {
    closed = Array.prototype.filter.call(
      document.querySelectorAll("details"), function (box) { return !box.open; }
    );
    closed.forEach(function (box) { box.open = true; });
  });
  window.addEventListener("afterprint", function () {
    closed.forEach(function (box) { box.open = false; });
  });
})();
