// What is wrong with how a part of a page looks: words that are too small, too faint or cut off, and boxes that spill.
// An arrow function of an element and limits, called in a page by tests/browser/browsing.py.
(root, limits) => {
  const found = [];
  const say = (element, what) => {
    const words = element.textContent.trim().replace(/\s+/g, " ").slice(0, 40);
    found.push(`${element.tagName.toLowerCase()}.${element.getAttribute("class") || ""} "${words}": ${what}`);
  };

  // colours as the browser paints them: a canvas understands every notation
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const colour = (text) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const light = (c) => {
    const [r, g, b] = c.slice(0, 3).map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  // contrast as WCAG 2 defines it
  const contrast = (one, other) => {
    const [a, b] = [light(one), light(other)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  };
  const behind = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      const own = colour(getComputedStyle(at).backgroundColor);
      if (own[3] > 0) layers.push(own);
      if (own[3] === 1) break;
    }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
  };

  for (const text of root.querySelectorAll("svg text")) {
    const svg = text.ownerSVGElement, box = text.getBoundingClientRect(), frame = svg.getBoundingClientRect();
    const size = parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a;
    if (size < limits.size) say(text, `letters of ${size.toFixed(1)} px`);
    if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1)
      say(text, "outside of its drawing");
    // the smallest filled rectangle that holds the middle of the words
    const [x, y] = [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
    let page = behind(svg), area = Infinity, holder = null;
    for (const rect of svg.querySelectorAll("rect")) {
      const at = rect.getBoundingClientRect();
      const inside = at.left <= x && x <= at.right && at.top <= y && y <= at.bottom;
      if (inside && at.width * at.height < area && at.height > 12)
        [area, page, holder] = [at.width * at.height, colour(getComputedStyle(rect).fill), at];
    }
    if (holder && (box.left < holder.left - 1 || box.right > holder.right + 1)) say(text, "spills out of its box");
    const ratio = contrast(over(colour(getComputedStyle(text).fill), page), page);
    if (ratio < limits.contrast) say(text, `contrast of ${ratio.toFixed(1)}`);
  }

  for (const element of root.querySelectorAll("*")) {
    if (element.closest("svg") || !element.checkVisibility()) continue;
    const style = getComputedStyle(element);
    if (style.overflowX === "visible" && style.display !== "inline" && element.scrollWidth > element.clientWidth + 1 &&
        element.clientWidth > 0 && !element.closest(limits.scrolls)) say(element, "spills out of its place");
    const words = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!words || element.closest("pre, .highlight, .headerlink, .cm-editor")) continue;
    if (parseFloat(style.fontSize) < limits.size) say(element, `letters of ${style.fontSize}`);
    const page = behind(element), ratio = contrast(over(colour(style.color), page), page);
    if (ratio < limits.contrast) say(element, `contrast of ${ratio.toFixed(1)}`);
  }
  return found;
};
