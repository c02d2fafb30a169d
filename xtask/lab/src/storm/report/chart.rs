//! Draws plots of curves over two axes, and stacked bars.
//!
//! A subject keeps its colour and its dashes in all drawings, so that readers need neither colour vision nor a colour
//! printer.

use std::fmt::{Display, Write as _};

/// The width of every drawing, in its own units. The page scales it.
pub(crate) const WIDTH: f64 = 760.0;
const LEFT: f64 = 88.0;
const RIGHT: f64 = 24.0;
const PLOT_HEIGHT: f64 = 270.0;
/// Height of the title above a plot, and of each line of a legend.
const TITLE_HEIGHT: f64 = 30.0;
const LEGEND_LINE: f64 = 20.0;
/// Height of the marks and the title of the horizontal axis.
const FOOT: f64 = 48.0;
const BAR: f64 = 24.0;
const BAR_GAP: f64 = 12.0;
/// The average width of a character, rounded up; it determines the place of a legend's next entry.
const CHARACTER: f64 = 7.0;
/// Number of colours. Further subjects use the same colours with other dashes.
const COLOURS: usize = 6;
const DASHES: [&str; 4] = ["none", "8 4", "2 3", "10 3 2 3"];

/// One axis of a plot.
pub(crate) struct Axis {
    /// The quantity, with its unit.
    pub(crate) title: &'static str,
    pub(crate) scale: Scale,
    /// Formats the label of a mark.
    pub(crate) label: fn(f64) -> String,
}

/// The curve of one subject.
pub(crate) struct Curve {
    /// The subject's index in the list of subjects, which determines its colour.
    pub(crate) subject: usize,
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

/// Curves over two axes.
pub(crate) struct Plot {
    pub(crate) title: String,
    pub(crate) x: Axis,
    pub(crate) y: Axis,
    pub(crate) curves: Vec<Curve>,
    /// Whether each point is marked, which suits a small number of points.
    pub(crate) marked: bool,
}

/// Horizontal bars of stacked parts.
pub(crate) struct Bars {
    pub(crate) title: String,
    pub(crate) axis: Axis,
    /// The names of the parts, in the order in which they are stacked.
    pub(crate) parts: Vec<&'static str>,
    /// Each bar's name and the values of its parts.
    pub(crate) rows: Vec<(String, Vec<f64>)>,
}

/// A plot or bars.
pub(crate) enum Drawing {
    Plot(Plot),
    Bars(Bars),
}

impl Drawing {
    /// Returns the title.
    pub(crate) fn title(&self) -> &str {
        match self {
            Self::Plot(plot) => &plot.title,
            Self::Bars(bars) => &bars.title,
        }
    }

    /// Writes the drawing as a figure of a page.
    pub(crate) fn figure(&self, xml: &mut Xml, caption: Option<&str>) {
        xml.within("figure", &[], |xml| {
            let view = format!("0 0 {} {}", At(WIDTH), At(self.height()));
            let title = self.title();
            let root: [Attribute<'_>; 4] = [
                ("xmlns", &"http://www.w3.org/2000/svg"),
                ("viewBox", &view),
                ("role", &"img"),
                ("aria-label", &title),
            ];
            xml.within("svg", &root, |xml| self.draw(xml));
            if let Some(caption) = caption {
                xml.line("figcaption", &[], caption);
            }
        });
    }

    /// Returns the height, in the units of [`WIDTH`].
    pub(crate) fn height(&self) -> f64 {
        match self {
            Self::Plot(plot) => plot.top() + PLOT_HEIGHT + FOOT,
            Self::Bars(bars) => bars.top() + bars.plot_height() + FOOT,
        }
    }

    /// Draws everything with the upper left corner at the origin.
    pub(crate) fn draw(&self, xml: &mut Xml) {
        xml.line("text", &[("class", &"title"), ("x", &At(0.0)), ("y", &At(18.0))], self.title());
        match self {
            Self::Plot(plot) => plot.draw(xml),
            Self::Bars(bars) => bars.draw(xml),
        }
    }
}

/// Returns the place of each entry of a legend, and the height of all its lines.
fn legend_places(names: &[&str]) -> (Vec<(f64, f64)>, f64) {
    let (mut x, mut y) = (0.0, 0.0);
    let mut places = Vec::with_capacity(names.len());
    for name in names {
        let width = 44.0 + CHARACTER * name.chars().count() as f64;
        if x > 0.0 && x + width > WIDTH - LEFT - RIGHT {
            (x, y) = (0.0, y + LEGEND_LINE);
        }
        places.push((LEFT + x, y));
        x += width;
    }
    (places, if names.is_empty() { 0.0 } else { y + LEGEND_LINE })
}

/// Returns class and dashes of a subject's line.
fn stroke(subject: usize) -> (String, &'static str) {
    let turn = subject + subject / COLOURS;
    (format!("line s{}", subject % COLOURS), DASHES[turn % DASHES.len()])
}

fn text(xml: &mut Xml, (x, y): (f64, f64), anchor: &'static str, words: &str) {
    let attributes: [Attribute<'_>; 3] = [("x", &At(x)), ("y", &At(y)), ("text-anchor", &anchor)];
    xml.line("text", &attributes, words);
}

fn rule(xml: &mut Xml, class: &'static str, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
    let ends: [Attribute<'_>; 5] =
        [("class", &class), ("x1", &At(x1)), ("y1", &At(y1)), ("x2", &At(x2)), ("y2", &At(y2))];
    xml.empty("line", &ends);
}

/// Draws marks, grid lines and title of the horizontal axis below a plot from `top` to `bottom`.
fn horizontal(xml: &mut Xml, axis: &Axis, top: f64, bottom: f64) {
    let width = WIDTH - LEFT - RIGHT;
    for mark in axis.scale.marks() {
        let x = LEFT + width * axis.scale.place(mark);
        rule(xml, "grid", (x, top), (x, bottom));
        text(xml, (x, bottom + 17.0), "middle", &(axis.label)(mark));
    }
    rule(xml, "axis", (LEFT, bottom), (WIDTH - RIGHT, bottom));
    text(xml, (LEFT + width / 2.0, bottom + 38.0), "middle", axis.title);
}

impl Plot {
    fn names(&self) -> Vec<&str> {
        self.curves.iter().map(|curve| curve.name.as_str()).collect()
    }

    fn top(&self) -> f64 {
        TITLE_HEIGHT + legend_places(&self.names()).1 + 8.0
    }

    fn draw(&self, xml: &mut Xml) {
        let (top, bottom) = (self.top(), self.top() + PLOT_HEIGHT);
        for (curve, (x, y)) in self.curves.iter().zip(legend_places(&self.names()).0) {
            let (class, dashes) = stroke(curve.subject);
            let y = TITLE_HEIGHT + y + 10.0;
            let line: [Attribute<'_>; 6] = [
                ("class", &class),
                ("stroke-dasharray", &dashes),
                ("x1", &At(x)),
                ("y1", &At(y)),
                ("x2", &At(x + 26.0)),
                ("y2", &At(y)),
            ];
            xml.empty("line", &line);
            text(xml, (x + 32.0, y + 4.0), "start", &curve.name);
        }
        horizontal(xml, &self.x, top, bottom);
        self.vertical(xml, top, bottom);
        for curve in &self.curves {
            self.curve(xml, curve, bottom);
        }
    }

    fn vertical(&self, xml: &mut Xml, top: f64, bottom: f64) {
        for mark in self.y.scale.marks() {
            let y = bottom - PLOT_HEIGHT * self.y.scale.place(mark);
            rule(xml, "grid", (LEFT, y), (WIDTH - RIGHT, y));
            text(xml, (LEFT - 8.0, y + 4.0), "end", &(self.y.label)(mark));
        }
        rule(xml, "axis", (LEFT, top), (LEFT, bottom));
        let turned = format!("translate(14 {}) rotate(-90)", At(f64::midpoint(top, bottom)));
        xml.line("text", &[("transform", &turned), ("text-anchor", &"middle")], self.y.title);
    }

    fn curve(&self, xml: &mut Xml, curve: &Curve, bottom: f64) {
        let place = |(x, y): (f64, f64)| {
            let x = LEFT + (WIDTH - LEFT - RIGHT) * self.x.scale.place(x);
            (x, bottom - PLOT_HEIGHT * self.y.scale.place(y))
        };
        let mut path = String::new();
        for &point in &curve.points {
            let (x, y) = place(point);
            let verb = if path.is_empty() { 'M' } else { 'L' };
            let _ = write!(path, "{verb}{} {}", At(x), At(y));
        }
        let (class, dashes) = stroke(curve.subject);
        if !path.is_empty() {
            xml.within("path", &[("class", &class), ("stroke-dasharray", &dashes), ("d", &path)], |xml| {
                xml.within("title", &[], |xml| xml.text(&curve.name));
            });
        }
        for &point in curve.points.iter().filter(|_| self.marked) {
            let (x, y) = place(point);
            let words = format!("{}: {} at {}", curve.name, (self.y.label)(point.1), (self.x.label)(point.0));
            xml.within(
                "circle",
                &[("class", &class), ("cx", &At(x)), ("cy", &At(y)), ("r", &"3.5")],
                |xml| {
                    xml.within("title", &[], |xml| xml.text(&words));
                },
            );
        }
        xml.text("\n");
    }
}

impl Bars {
    fn top(&self) -> f64 {
        TITLE_HEIGHT + legend_places(&self.parts).1 + 8.0
    }

    /// Returns the height of all bars. A bar's name is above it, so that long names need no margin.
    fn plot_height(&self) -> f64 {
        self.rows.len().max(1) as f64 * (BAR + BAR_GAP + 14.0) + BAR_GAP
    }

    fn draw(&self, xml: &mut Xml) {
        let top = self.top();
        for (part, (name, (x, y))) in self.parts.iter().zip(legend_places(&self.parts).0).enumerate() {
            let y = TITLE_HEIGHT + y + 3.0;
            let class = format!("part p{part}");
            rectangle(xml, &class, (x, y), (14.0, 14.0));
            text(xml, (x + 20.0, y + 11.0), "start", name);
        }
        horizontal(xml, &self.axis, top, top + self.plot_height());
        for (row, (name, values)) in self.rows.iter().enumerate() {
            let y = top + BAR_GAP + row as f64 * (BAR + BAR_GAP + 14.0);
            self.bar(xml, y, name, values);
        }
        rule(xml, "axis", (LEFT, top), (LEFT, top + self.plot_height()));
    }

    fn bar(&self, xml: &mut Xml, y: f64, name: &str, values: &[f64]) {
        text(xml, (LEFT + 6.0, y + 10.0), "start", name);
        let mut from = 0.0;
        for (part, &value) in values.iter().enumerate() {
            let place = |value| LEFT + (WIDTH - LEFT - RIGHT) * self.axis.scale.place(value);
            let (x, end) = (place(from), place(from + value));
            let words = format!("{name}, {}: {}", self.parts[part], (self.axis.label)(value));
            xml.within("g", &[], |xml| {
                xml.within("title", &[], |xml| xml.text(&words));
                rectangle(xml, &format!("part p{part}"), (x, y + 16.0), (end - x, BAR));
                let label = (self.axis.label)(value);
                // The label is left out where it does not fit. The table has every value.
                if end - x > CHARACTER * label.chars().count() as f64 + 6.0 {
                    let at = f64::midpoint(x, end);
                    let class = format!("inside i{part}");
                    let place: [Attribute<'_>; 4] = [
                        ("class", &class),
                        ("x", &At(at)),
                        ("y", &At(y + 16.0 + BAR / 2.0 + 4.0)),
                        ("text-anchor", &"middle"),
                    ];
                    xml.within("text", &place, |xml| xml.text(&label));
                }
            });
            from += value;
        }
        xml.text("\n");
    }
}

fn rectangle(xml: &mut Xml, class: &str, (x, y): (f64, f64), (width, height): (f64, f64)) {
    let attributes: [Attribute<'_>; 5] = [
        ("class", &class),
        ("x", &At(x)),
        ("y", &At(y)),
        ("width", &At(width.max(0.0))),
        ("height", &At(height)),
    ];
    xml.empty("rect", &attributes);
}

// Maps values to places on an axis, and chooses the marks along it.

/// How values are mapped to an axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Scale {
    /// Equal steps from 0.
    Linear {
        /// The value at the far end.
        max: f64,
        /// The distance between marks.
        step: f64,
    },
    /// Equal lengths for each factor of ten. Values below `min` are drawn at `min`.
    Log {
        /// The value at the near end, above 0.
        min: f64,
        /// The value at the far end.
        max: f64,
    },
    /// Fractions from 0 to 1, spaced by their distance from 1. The range from 0 to 90 % is as long as the one from 90
    /// to 99 %, so that tails are visible.
    Tail {
        /// Number of nines at the far end.
        nines: u8,
    },
}

/// The most marks on a linear axis.
const LINEAR_MARKS: f64 = 6.0;
/// The most powers of ten on a logarithmic axis. Lower values are drawn at the near end.
const MAX_DECADES: f64 = 9.0;

impl Scale {
    /// Returns an axis with equal steps for all `values`.
    pub(crate) fn linear(values: impl Iterator<Item = f64>) -> Self {
        Self::even(values, |_| 1.0)
    }

    /// Returns an axis with equal steps, round in KiB, MiB or GiB, for all `bytes`.
    pub(crate) fn binary(bytes: impl Iterator<Item = f64>) -> Self {
        Self::even(bytes, |max| {
            let units = [30, 20, 10].map(|power| 2_f64.powi(power));
            units.into_iter().find(|unit| max >= *unit).unwrap_or(1.0)
        })
    }

    fn even(values: impl Iterator<Item = f64>, unit: fn(f64) -> f64) -> Self {
        let max = values.filter(|value| value.is_finite()).fold(0.0, f64::max);
        if max <= 0.0 {
            return Self::Linear { max: 1.0, step: 1.0 };
        }
        let unit = unit(max);
        let step = round_up(max / unit / LINEAR_MARKS) * unit;
        Self::Linear { max: (max / step - 1e-9).ceil() * step, step }
    }

    /// Returns a logarithmic axis with ends at 1, 2 or 5 times a power of ten, for all `values` above 0.
    pub(crate) fn log(values: impl Iterator<Item = f64> + Clone) -> Self {
        let values = values.filter(|value| value.is_finite() && *value > 0.0);
        let (low, high) = values
            .fold((f64::INFINITY, 0.0), |(low, high): (f64, f64), value| (low.min(value), high.max(value)));
        if high == 0.0 {
            return Self::Log { min: 1.0, max: 10.0 };
        }
        let low = low.max(high / 10_f64.powf(MAX_DECADES));
        let (min, max) = (round_down(low), round_up(high));
        // The axis needs some length even for a single value.
        if max / min < 5.0 { Self::Log { min: min / 2.0, max: max * 2.0 } } else { Self::Log { min, max } }
    }

    /// Returns the place of a value, from 0 at the near end to 1 at the far end.
    pub(crate) fn place(self, value: f64) -> f64 {
        let place = match self {
            Self::Linear { max, .. } => value / max,
            Self::Log { min, max } => (value.max(min) / min).ln() / (max / min).ln(),
            Self::Tail { nines } => {
                let left = (1.0 - value).max(10_f64.powi(-i32::from(nines)));
                -left.log10() / f64::from(nines)
            }
        };
        if place.is_nan() { 0.0 } else { place.clamp(0.0, 1.0) }
    }

    /// Returns the values of the marks, from the near end to the far end.
    pub(crate) fn marks(self) -> Vec<f64> {
        match self {
            Self::Linear { max, step } => {
                let count = (max / step + 1e-9).floor() as u32;
                (0..=count).map(|n| f64::from(n) * step).collect()
            }
            Self::Log { min, max } => log_marks(min, max),
            Self::Tail { nines } => {
                let nines = (1..=i32::from(nines)).map(|nines| 1.0 - 10_f64.powi(-nines));
                [0.0, 0.5].into_iter().chain(nines).collect()
            }
        }
    }
}

fn log_marks(min: f64, max: f64) -> Vec<f64> {
    let decades = (max / min).log10();
    let multiples: &[f64] = if decades <= 3.0 { &[1.0, 2.0, 5.0] } else { &[1.0] };
    let (first, last) = (min.log10().floor() as i32, max.log10().ceil() as i32);
    let all = (first..=last).flat_map(|power| multiples.iter().map(move |m| m * 10_f64.powi(power)));
    all.filter(|mark| (min * 0.999..=max * 1.001).contains(mark)).collect()
}

fn round_up(value: f64) -> f64 {
    let power = 10_f64.powf(value.log10().floor());
    let multiple = [1.0, 2.0, 5.0].into_iter().find(|m| m * power >= value * (1.0 - 1e-9));
    multiple.unwrap_or(10.0) * power
}

fn round_down(value: f64) -> f64 {
    let power = 10_f64.powf(value.log10().floor());
    let multiple = [5.0, 2.0, 1.0].into_iter().find(|m| m * power <= value * (1.0 + 1e-9));
    multiple.unwrap_or(1.0) * power
}

// Writes XML whose elements are closed by construction and whose text is escaped, so that pages and images are
// well-formed for any results.

/// An attribute and its value.
pub(crate) type Attribute<'a> = (&'a str, &'a dyn Display);

/// A document being written.
#[derive(Default)]
pub(crate) struct Xml {
    out: String,
}

impl Xml {
    /// Returns the document.
    pub(crate) fn finish(self) -> String {
        self.out
    }

    /// Writes an element with the content that `inside` writes.
    pub(crate) fn within(&mut self, tag: &str, attributes: &[Attribute<'_>], inside: impl FnOnce(&mut Self)) {
        self.start(tag, attributes);
        self.out.push('>');
        inside(self);
        let _ = write!(self.out, "</{tag}>");
    }

    /// Writes an element without content: a shape, or one of HTML's void elements.
    pub(crate) fn empty(&mut self, tag: &str, attributes: &[Attribute<'_>]) {
        self.start(tag, attributes);
        self.out.push_str("/>");
    }

    /// Writes an element with text, and a line end after it.
    pub(crate) fn line(&mut self, tag: &str, attributes: &[Attribute<'_>], text: impl Display) {
        self.within(tag, attributes, |xml| xml.text(text));
        self.out.push('\n');
    }

    /// Writes text, escaped.
    pub(crate) fn text(&mut self, text: impl Display) {
        let text = text.to_string();
        self.escape(&text);
    }

    /// Writes constant markup unchanged: a style sheet or a document type.
    pub(crate) fn verbatim(&mut self, text: &'static str) {
        self.out.push_str(text);
    }

    fn start(&mut self, tag: &str, attributes: &[Attribute<'_>]) {
        let _ = write!(self.out, "<{tag}");
        for (name, value) in attributes {
            let _ = write!(self.out, " {name}=\"");
            let value = value.to_string();
            self.escape(&value);
            self.out.push('"');
        }
    }

    fn escape(&mut self, text: &str) {
        for character in text.chars() {
            match character {
                '&' => self.out.push_str("&amp;"),
                '<' => self.out.push_str("&lt;"),
                '>' => self.out.push_str("&gt;"),
                '"' => self.out.push_str("&quot;"),
                // XML 1.0 §2.2 cannot express the other control characters.
                '\t' | '\n' | '\r' | ' '.. if !matches!(character, '\u{fffe}' | '\u{ffff}') => {
                    self.out.push(character)
                }
                _ => self.out.push('\u{fffd}'),
            }
        }
    }
}

/// A coordinate, rounded to a tenth of a unit. Values that are not finite become 0.
pub(crate) struct At(pub(crate) f64);

impl Display for At {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let value = if self.0.is_finite() { self.0 } else { 0.0 };
        write!(f, "{value:.1}")
    }
}

#[cfg(test)]
mod tests {
    use super::{At, Scale, Xml};

    #[test]
    fn every_value_is_on_its_axis() {
        for values in [vec![], vec![0.0], vec![3.7], vec![f64::NAN, 1e-9, 12.0], vec![0.001, 5_000_000.0]] {
            let all = || values.iter().copied();
            for scale in [Scale::linear(all()), Scale::binary(all()), Scale::log(all())] {
                for &value in &values {
                    let place = scale.place(value);
                    assert!((0.0..=1.0).contains(&place), "{value} in {scale:?}: {place}");
                }
                let marks = scale.marks();
                assert!((2..40).contains(&marks.len()), "{scale:?}: {marks:?}");
                assert!(marks.is_sorted(), "{marks:?}");
            }
        }
    }

    #[test]
    fn marks_are_round_numbers() {
        let marks = Scale::linear([37.2].into_iter()).marks();
        assert_eq!(marks, [0.0, 10.0, 20.0, 30.0, 40.0]);
        let mib = f64::from(1 << 20);
        assert_eq!(Scale::binary([4.3 * mib].into_iter()), Scale::Linear { max: 5.0 * mib, step: mib });
        assert_eq!(Scale::log([12.0, 900.0].into_iter()), Scale::Log { min: 10.0, max: 1_000.0 });
    }

    #[test]
    fn each_nine_of_a_tail_has_the_same_length() {
        let scale = Scale::Tail { nines: 4 };
        for (share, place) in [(0.0, 0.0), (0.9, 0.25), (0.99, 0.5), (0.999, 0.75), (1.0, 1.0)] {
            assert!((scale.place(share) - place).abs() < 1e-9, "{share}");
        }
    }

    #[test]
    fn text_and_attributes_are_escaped() {
        let mut xml = Xml::default();
        xml.within("p", &[("title", &"a\"b<c")], |xml| xml.text("1 < 2 & \u{1}3 > \"2\""));
        assert_eq!(
            xml.finish(),
            "<p title=\"a&quot;b&lt;c\">1 &lt; 2 &amp; \u{fffd}3 &gt; &quot;2&quot;</p>"
        );
    }

    #[test]
    fn a_coordinate_that_is_not_finite_becomes_zero() {
        assert_eq!(At(f64::NAN).to_string(), "0.0");
        assert_eq!(At(f64::INFINITY).to_string(), "0.0");
        assert_eq!(At(12.345).to_string(), "12.3");
    }
}
