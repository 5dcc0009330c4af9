// A search field above the table of findings: rows without all of its words are hidden.
document.addEventListener("DOMContentLoaded", function () {
  var table = document.querySelector("#findings table");
  if (!table) return;
  var field = document.createElement("input");
  field.type = "search";
  field.placeholder = "Filter by symptom or error text";
  field.setAttribute("aria-label", field.placeholder);
  field.style.cssText = "width: 100%; padding: 0.5em; margin: 1em 0; font: inherit";
  var first = table.closest(".table-wrapper") || table;
  first.parentNode.insertBefore(field, first);
  field.addEventListener("input", function () {
    var words = field.value.toLowerCase().split(/\s+/);
    table.querySelectorAll("tbody tr").forEach(function (row) {
      var text = row.textContent.toLowerCase();
      row.hidden = !words.every(function (word) { return text.includes(word); });
    });
  });
});
