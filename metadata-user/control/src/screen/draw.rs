//! Draws the view into cells.

mod node;

use crate::top::{BootStage, SeenRequest, Top, VmPage};
use metadata_common::printable::is_printable;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;

use crate::screen::figures::{byte_size, count, micros, time};
use crate::screen::{Screen, ScreenContent, TerminalStyle};

/// What each key does.
const KEYS: [(&str, &str); 9] = [
    ("up, down, j, k", "select a VM; PgUp, PgDn, Home, End, too"),
    ("Enter", "show the selected VM with its last requests"),
    ("Esc", "go back; on the list: remove the filter"),
    ("/", "filter by name, UUID, port, MAC, dialect or stage"),
    ("s", "change the order: newest, requests, failed, stage, name"),
    ("? or h", "this help"),
    ("Ctrl-L", "draw everything again"),
    ("q", "quit; on a page: go back"),
    ("Ctrl-C", "quit"),
];

/// What each stage means.
const STAGES: [(BootStage, &str); 6] = [
    (BootStage::Unattached, "its port is not attached"),
    (BootStage::Unrecorded, "its record has not arrived; its requests are held"),
    (BootStage::Asking, "it sends requests"),
    (BootStage::Quiet, "it has sent requests, and none for 3 s"),
    (BootStage::Silent, "it has sent no request since you watch"),
    (BootStage::Gone, "its record is gone; it gets 404"),
];

/// What other words of the screen mean.
const WORDS: [(&str, &str); 4] = [
    ("latency", "of the last 10 s: half, 90 %, 99 % and all took at most this"),
    ("parked", "requests that wait for a record, the rate limit, or a change"),
    ("hub", "a worker: its load, and the connections that it holds"),
    ("UD, ST", "the guest has its user-data; the status of its last answer"),
];

/// Draws the view. The area may have any size.
pub fn draw(screen: &Screen, look: TerminalStyle, into: &mut Buffer) {
    let mut page = Page { look, area: into.area, y: 0, into };
    page.title(screen);
    match (&screen.shown, screen.top()) {
        (ScreenContent::Help, _) => page.help(),
        (ScreenContent::Vm(name), Some(_)) => page.vm(name, screen.pages(name)),
        (ScreenContent::Node, Some(top)) => page.node(screen, top),
        (_, None) => {
            page.line(if screen.away.is_some() { "" } else { "Waiting for the agent ..." }, Style::new())
        }
    }
    page.footer(screen);
}

/// Cells that are filled line by line.
struct Page<'a> {
    look: TerminalStyle,
    area: Rect,
    /// The next line.
    y: u16,
    into: &'a mut Buffer,
}

impl Page<'_> {
    fn width(&self) -> usize {
        self.area.width.into()
    }

    /// Lines that are free above the footer.
    fn room(&self) -> usize {
        usize::from(self.area.height.saturating_sub(1).saturating_sub(self.y))
    }

    /// Writes a text at a column of the present line, at most `width` wide.
    fn put(&mut self, x: usize, text: &str, width: usize, style: Style) {
        self.put_at(x, self.y, text, width, style);
    }

    fn put_at(&mut self, x: usize, y: u16, text: &str, width: usize, style: Style) {
        let Ok(x) = u16::try_from(x) else { return };
        if x < self.area.width && y < self.area.height {
            let text: String = text.chars().map(|c| if is_printable(c) { c } else { '?' }).collect();
            let text = if self.look.unicode { text } else { ascii(&text) };
            self.into.set_stringn(x, y, text, width.min(usize::from(self.area.width - x)), style);
        }
    }

    /// Writes a line, unless it would be on the footer.
    fn line(&mut self, text: &str, style: Style) {
        if self.room() > 0 {
            self.put(0, text, self.width(), style);
            self.y += 1;
        }
    }

    /// Writes a line with a label in front.
    fn labelled(&mut self, label: &str, text: &str, style: Style) {
        if self.room() > 0 {
            self.put(0, label, LABEL, self.look.strong());
            self.put(LABEL, text, self.width(), style);
            self.y += 1;
        }
    }

    fn title(&mut self, screen: &Screen) {
        let is_well = screen.away.is_none() && screen.top().is_none_or(|top| top.troubles.is_empty());
        let style = self.look.title(is_well);
        let line = Rect { height: self.area.height.min(1), ..self.area };
        self.into.set_style(line, style);
        let text = match (screen.top(), &screen.away) {
            (Some(Top { version, node, .. }), Some(_)) => {
                format!("xdp-imds {version} on {node}: away, the figures are old")
            }
            (Some(Top { version, node, phase, uptime, troubles, .. }), None) => {
                let problems = match troubles.len() {
                    0 => String::new(),
                    1 => ", 1 problem".into(),
                    many => format!(", {many} problems"),
                };
                format!("xdp-imds {version} on {node}: {}, up {}{problems}", phase.name(), time(*uptime))
            }
            (None, Some(_)) => "xdp-imds: away".into(),
            (None, None) => "xdp-imds".into(),
        };
        self.put(0, &text, self.width(), style);
        self.y = 1;
    }

    fn help(&mut self) {
        let plain = Style::new();
        self.line("", plain);
        for (key, what) in KEYS {
            self.line(&format!("  {key:<16}{what}"), plain);
        }
        self.line("", plain);
        for (stage, what) in STAGES {
            self.line(&format!("  {:<16}{what}", stage.name()), plain);
        }
        self.line("", plain);
        for (word, what) in WORDS {
            self.line(&format!("  {word:<16}{what}"), plain);
        }
    }

    /// The last line: why there is nothing new, the filter that is typed, or keys.
    fn footer(&mut self, screen: &Screen) {
        let last = self.area.height.saturating_sub(1);
        if last == 0 {
            return;
        }
        let (text, style) = match (&screen.away, &screen.typed, &screen.shown) {
            (_, Some(typed), _) => {
                (format!("filter: {typed}_   (Enter applies, Esc cancels)"), self.look.strong())
            }
            (Some(reason), ..) => (format!("The agent is away: {reason}"), self.look.bad()),
            (None, None, ScreenContent::Node) => (
                format!("q quit  / filter  s sort: {}  Enter VM  ? help", screen.query.sort.name()),
                Style::new(),
            ),
            (None, None, ScreenContent::Vm(_) | ScreenContent::Help) => {
                ("Esc back  ? help".into(), Style::new())
            }
        };
        self.put_at(0, last, &text, self.width(), style);
    }
}

/// The width of labels.
const LABEL: usize = 10;

/// The text for a terminal that shows only ASCII.
fn ascii(text: &str) -> String {
    text.chars().map(|c| if c.is_ascii() { c } else { '?' }).collect()
}

// A VM's own page.

impl Page<'_> {
    fn vm(&mut self, name: &str, pages: Option<&[VmPage]>) {
        match pages {
            None => self.line(&format!("Asking for {name} ..."), Style::new()),
            Some([]) => self.line(&format!("No VM is called {name} any more."), self.look.strong()),
            Some(pages) => pages.iter().for_each(|page| self.vm_page(page)),
        }
    }

    fn vm_page(&mut self, page: &VmPage) {
        let row = &page.row;
        self.line("", Style::new());
        self.line(&format!("{} on {}", row.name(), row.port), self.look.strong());
        self.labelled("MAC", &row.mac, Style::new());
        for (label, value) in [("UUID", &row.uuid), ("record", &page.record), ("dialect", &row.dialect)] {
            self.labelled(label, value.as_deref().unwrap_or("none"), Style::new());
        }
        let stage = match &row.waits_for {
            Some(reason) if row.port_error => format!("{}: {reason}", row.stage.name()),
            Some(what) => format!("{}, waits: {what}", row.stage.name()),
            None => row.stage.name().to_owned(),
        };
        let style = match &row.waits_for {
            Some(_) if row.port_error => self.look.bad(),
            Some(_) => self.look.waits(),
            None => Style::new(),
        };
        self.labelled("stage", &stage, style);
        let of = |what: &str, value: Option<String>| value.map(|value| format!("{what} {value}"));
        let node = [
            of("program", page.program.clone()),
            of("hub", page.hub.map(|hub| hub.to_string())),
            of("slot", page.slot.map(|slot| slot.to_string())),
            page.held
                .map(|held| format!("{} connections, {} requests held", held.connections, held.requests)),
        ];
        self.labelled("served", &node.into_iter().flatten().collect::<Vec<_>>().join(", "), Style::new());
        let user_data = if row.has_user_data { "sent" } else { "not seen" };
        let requests = format!(
            "{} seen, {} failed, first {} ago, last {} ago; user-data {user_data}",
            count(row.requests),
            count(row.failed),
            row.boot.or(row.first).map_or_else(|| "never".into(), time),
            row.last.map_or_else(|| "never".into(), time)
        );
        let requests = if row.first.is_none() { "none seen since you watch".into() } else { requests };
        self.labelled("requests", &requests, Style::new());
        self.line("", Style::new());
        if page.requests.is_empty() {
            return;
        }
        self.line(
            &format!(
                "{:>7} {:<7} {:>3} {:>8} {:>8} {:<12} PATH",
                "AGO", "METHOD", "ST", "SIZE", "TOOK", "DIALECT"
            ),
            self.look.strong(),
        );
        for request in &page.requests {
            let SeenRequest { ago, method, path, dialect, status, bytes, us } = request;
            let text = format!(
                "{:>7} {method:<7} {status:>3} {:>8} {:>8} {dialect:<12} {path}",
                time(*ago),
                byte_size(*bytes),
                micros(*us)
            );
            let failed = *status == 429 || *status >= 500;
            self.line(&text, if failed { self.look.bad() } else { Style::new() });
        }
    }
}

/// One screen as lines of text, without trailing spaces and without colours.
#[must_use]
pub fn plain(screen: &Screen, (width, height): (u16, u16), look: TerminalStyle) -> String {
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
