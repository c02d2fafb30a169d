//! Shows a storm's results as a page for colleagues, and as one image. Each is a single file.
//!
//! Both are XML. The page is also valid HTML. Both have colours for light and dark screens and for paper.

pub(crate) mod chart;
mod figures;
mod page;
pub(crate) mod scale;
#[cfg(test)]
mod tests;
pub(crate) mod units;
mod words;
pub(crate) mod xml;

use super::figure::left_out;
use super::model::{Case, Results};
use chart::{Drawing, WIDTH};
use std::fmt::{self, Display};
use xml::{At, Attribute, Xml};

pub(crate) use figures::show;

pub(crate) const STYLE: &str = include_str!("report/style.css");
/// Space around the drawings of an image.
const MARGIN: f64 = 20.0;
/// Height of a line of text.
const LINE: f64 = 22.0;

/// Returns the page.
pub(crate) fn html(results: &Results) -> String {
    page::page(results)
}

/// Returns the most significant case as one SVG image for a README or a slide, with drawings in two columns.
pub(crate) fn svg(results: &Results) -> String {
    let names = figures::subjects(results);
    let case = words::foremost(results);
    let mut drawings = case.map(|case| figures::of_case(case, &names)).unwrap_or_default();
    drawings.extend(figures::memory(results, &names));
    let drawings: Vec<Drawing> = drawings.into_iter().map(|(drawing, _)| drawing).collect();
    let rows: Vec<&[Drawing]> = drawings.chunks(2).collect();
    let heights: Vec<f64> =
        rows.iter().map(|row| row.iter().map(Drawing::height).fold(0.0, f64::max) + MARGIN).collect();

    let title = case
        .map_or_else(|| "No case was measured".to_owned(), |case| format!("Boot storm: {}", case.settings));
    let heads = case.map(words::headlines).unwrap_or_default();
    let mut below = case.map(left_out).unwrap_or_default();
    below.extend(page::environment(results));
    let lines = (1 + heads.len() + below.len()) as f64 * LINE;
    let (width, height) = (2.0 * WIDTH + 3.0 * MARGIN, lines + heights.iter().sum::<f64>() + 3.0 * MARGIN);

    let view = format!("0 0 {} {}", At(width), At(height));
    let mut xml = Xml::default();
    let root: [Attribute<'_>; 3] =
        [("xmlns", &"http://www.w3.org/2000/svg"), ("viewBox", &view), ("role", &"img")];
    xml.within("svg", &root, |xml| {
        xml.line("title", &[], &title);
        xml.within("style", &[], |xml| xml.verbatim(STYLE));
        let back: [Attribute<'_>; 3] = [("class", &"back"), ("width", &"100%"), ("height", &"100%")];
        xml.empty("rect", &back);
        let mut y = MARGIN + 8.0;
        text(xml, &mut y, "title", &title);
        heads.iter().for_each(|words| text(xml, &mut y, "head", words));
        for (row, height) in rows.iter().zip(&heights) {
            for (column, drawing) in row.iter().enumerate() {
                let x = MARGIN + column as f64 * (WIDTH + MARGIN);
                let moved = format!("translate({} {})", At(x), At(y));
                xml.within("g", &[("transform", &moved)], |xml| drawing.draw(xml));
            }
            y += height;
        }
        below.iter().for_each(|words| text(xml, &mut y, "note", words));
    });
    xml.finish()
}

/// Writes a line of text, and moves `y` below it.
fn text(xml: &mut Xml, y: &mut f64, class: &str, words: &str) {
    xml.line("text", &[("class", &class), ("x", &At(MARGIN)), ("y", &At(*y))], words);
    *y += LINE;
}

/// Formats the settings of a case.
impl Display for super::model::Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { dialect, vms, user_data_bytes, requests_per_boot: _, options } = self;
        let machines = if *vms == 1 { "VM" } else { "VMs" };
        let size = units::memory(*user_data_bytes as f64);
        write!(f, "{dialect}, {} {machines}, user-data {size}", units::number(f64::from(*vms)))?;
        options.iter().try_for_each(|(option, value)| write!(f, ", {option} {value}"))
    }
}

/// Returns the numbers of rounds and of requests behind the figures of a case.
fn size(case: &Case) -> String {
    let rounds = case.subjects.iter().map(|subject| subject.rounds.len()).max().unwrap_or(0);
    let requests = case.settings.requests_per_boot;
    format!("{rounds} rounds of each subject, alternating; {requests} requests per boot")
}
