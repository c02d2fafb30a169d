//! Cells as plain text.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;

use crate::draw::draw;
use crate::{Look, Screen};

/// One screen as lines of text, without trailing spaces and without colours.
#[must_use]
pub fn plain(screen: &Screen, (width, height): (u16, u16), look: Look) -> String {
    let mut buffer = Buffer::empty(Rect::new(0, 0, width, height));
    draw(screen, look, &mut buffer);
    lines(&buffer)
}

/// The lines of a buffer. Empty lines at the end are left out.
fn lines(buffer: &Buffer) -> String {
    let width = usize::from(buffer.area.width.max(1));
    let line = |cells: &[ratatui::buffer::Cell]| {
        cells.iter().map(ratatui::buffer::Cell::symbol).collect::<String>().trim_end().to_owned()
    };
    let lines: Vec<_> = buffer.content.chunks(width).map(line).collect();
    format!("{}\n", lines.join("\n").trim_end())
}
