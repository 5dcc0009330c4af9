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

  function save(source, name, type) {
    var link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([source.textContent], { type: type }));
    link.download = name;
    link.click();
    setTimeout(function () { URL.revokeObjectURL(link.href); }, 10000);
  }

  // Positions in the drawing are per cent: a wider drawing is an enlarged one, with room for names.
  var times = 1;
  function enlarge(factor) {
    var drawing = document.querySelector("#proof .wide"), box = drawing.closest(".scroll");
    var wider = Math.min(64, Math.max(1, times * factor));
    var left = box.scrollLeft * wider / times;
    times = wider;
    drawing.style.width = 100 * times + "%";
    box.scrollLeft = left;
    drawing.querySelectorAll("g[data-name]").forEach(nameBox);
    divideScale(drawing);
    say(times === 1 ? "As wide as the page" : times + " times as wide");
  }
  // As many marks on a screen as before: those of the page, and finer ones between them.
  function divideScale(drawing) {
    drawing.querySelectorAll(".fine").forEach(function (mark) { mark.remove(); });
    var whole = drawing.querySelectorAll(".tick"), lines = drawing.querySelectorAll(".grid");
    if (whole.length < 2) { return; }
    var parts = [50, 20, 10, 5, 2, 1].find(function (number) { return number <= times; });
    var part = parseFloat(whole[1].getAttribute("x")) / parts;
    var value = parseFloat(whole[1].textContent) / parts;
    for (var number = 1; number * part < 97; number += 1) {
      if (number % parts === 0) { continue; }
      var line = lines[0].cloneNode(), text = whole[0].cloneNode();
      [["x1", line], ["x2", line], ["x", text]].forEach(function (side) {
        side[1].setAttribute(side[0], number * part + "%");
        side[1].classList.add("fine");
      });
      text.textContent = Number((number * value).toPrecision(6)) + " ms";
      lines[0].before(line);
      whole[0].after(text);
    }
  }
  function nameBox(group) {
    var SVG = "http://www.w3.org/2000/svg", drawn = group.querySelector("rect");
    var room = Math.floor(drawn.getBoundingClientRect().width / 7.2) - 1, name = group.dataset.name;
    var text = group.querySelector("text");
    if (!text && room >= name.length) {
      var frame = group.appendChild(document.createElementNS(SVG, "svg"));
      ["x", "y", "width", "height"].forEach(function (side) {
        frame.setAttribute(side, drawn.getAttribute(side));
      });
      text = frame.appendChild(document.createElementNS(SVG, "text"));
      text.setAttribute("class", "on-op");
      text.setAttribute("x", "4");
      text.setAttribute("y", "18");
    }
    if (text && text.dataset.short === undefined) { text.dataset.short = text.textContent; }
    if (text) { text.textContent = room >= name.length ? name : text.dataset.short; }
  }

  // One operator in every lane: marked there, with its name and times in the line below.
  function showOperator(drawing, number) {
    var boxes = drawing.querySelectorAll("[data-op]"), said = [], name = "";
    boxes.forEach(function (box) {
      var same = box.dataset.op === String(number);
      box.classList.toggle("same", same);
      if (same) {
        name = box.dataset.name;
        said.push(box.parentElement.dataset.lane + " " + box.dataset.time);
      }
    });
    if (!said.length) { return; }
    drawing.dataset.shown = number;
    drawing.closest("figure").querySelector(".op-said").textContent =
      name + ": " + said.join(", ");
  }
  function stepOperator(drawing, by) {
    var numbers = Array.prototype.map.call(drawing.querySelectorAll("[data-op]"), function (box) {
      return Number(box.dataset.op);
    });
    var last = Math.max.apply(null, numbers), shown = drawing.dataset.shown;
    for (var next = (shown ? Number(shown) : -1) + by; next >= 0 && next <= last; next += by) {
      if (numbers.indexOf(next) >= 0) { showOperator(drawing, next); return; }
    }
  }
  function watchOperators(drawing) {
    ["pointerover", "pointerdown"].forEach(function (kind) {
      drawing.addEventListener(kind, function (event) {
        var box = event.target.closest("[data-op]");
        if (box) { showOperator(drawing, Number(box.dataset.op)); }
      });
    });
    drawing.setAttribute("tabindex", "0");
    drawing.addEventListener("keydown", function (event) {
      var by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (by) {
        event.preventDefault();
        stepOperator(drawing, by);
      }
    });
  }

  // The lanes' names stay where they can be read.
  function keepNames(box) {
    box.querySelectorAll(".lane-name").forEach(function (name) {
      name.setAttribute("x", box.scrollLeft);
    });
  }

  // Perfetto's own way to be given a trace: it answers PONG once it can take one.
  var PERFETTO = "https://ui.perfetto.dev";
  function openInPerfetto(source) {
    var there = window.open(PERFETTO);
    if (!there) { say("The browser opened no window: download the trace and drop it there"); return; }
    var asking = setInterval(function () { there.postMessage("PING", PERFETTO); }, 100);
    function hand(event) {
      if (event.source !== there || event.origin !== PERFETTO || event.data !== "PONG") { return; }
      clearInterval(asking);
      window.removeEventListener("message", hand);
      var buffer = new TextEncoder().encode(source.textContent).buffer;
      there.postMessage({ perfetto: { buffer: buffer, title: "recompute-scan" } }, PERFETTO);
    }
    window.addEventListener("message", hand);
    setTimeout(function () { clearInterval(asking); }, 60000);
  }

  // Where the script is follows from where this page lies; no page holds a path of a machine.
  function linkEditor(place) {
    var parts = decodeURIComponent(location.pathname).split("/recompute-scan-out/");
    if (location.protocol !== "file:" || parts.length !== 2) { return; }
    var link = place.appendChild(document.createElement("a"));
    link.href = "vscode://file" + encodeURI(parts[0] + "/" + place.dataset.place);
    link.textContent = "Open in VS Code";
  }

  function askForHelp() { document.getElementById("help").showModal(); }

  document.addEventListener("keydown", function (event) {
    var typing = event.ctrlKey || event.metaKey || event.altKey;
    var help = document.getElementById("help");  // the comparison has none
    if (event.key === "?" && !typing && help && !help.open) { askForHelp(); }
  });

  document.addEventListener("DOMContentLoaded", function () {
    document.querySelectorAll(".tools, .copy, .take").forEach(function (item) { item.hidden = false; });
    document.querySelectorAll("#proof .scroll").forEach(function (box) {
      box.addEventListener("scroll", function () { keepNames(box); });
    });
    document.querySelectorAll(".lanes").forEach(watchOperators);
    document.querySelectorAll(".editor").forEach(linkEditor);
    var allOpen = false;
    document.addEventListener("click", function (event) {
      var button = event.target.closest("button");
      if (!button) { return; }
      if (button.dataset.copy) { copy(document.getElementById(button.dataset.copy)); }
      if (button.dataset.save) {
        save(document.getElementById(button.dataset.save), button.dataset.name, button.dataset.type);
      }
      if (button.dataset.do === "help") { askForHelp(); }
      if (button.dataset.do === "close") { button.closest("dialog").close(); }
      if (button.dataset.do === "next") { stepOperator(document.querySelector("#proof .lanes"), 1); }
      if (button.dataset.do === "previous") { stepOperator(document.querySelector("#proof .lanes"), -1); }
      if (button.dataset.do === "enlarge") { enlarge(2); }
      if (button.dataset.do === "shrink") { enlarge(0.5); }
      if (button.dataset.do === "perfetto") { openInPerfetto(document.getElementById("as-trace")); }
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
})();
