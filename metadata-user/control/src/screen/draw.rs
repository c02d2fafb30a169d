//! Draws the view into cells.

use metadata_common::printable::{counted, is_printable};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Modifier, Style};
use std::ops::RangeInclusive;

use crate::screen::{Screen, ScreenContent, TerminalStyle};
use crate::status::WorkerStatus;
use crate::top::{BootStage, SeenRequest, Top, VmPage, VmRow};

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
    (BootStage::Gone, "its record is gone; it gets no answer"),
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
            Some(pages) => {
                for page in pages {
                    self.vm_page(page);
                }
            }
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
        for (at, line) in wrapped(&stage, self.width().saturating_sub(LABEL)).into_iter().enumerate() {
            self.labelled(if at == 0 { "stage" } else { "" }, line, style);
        }
        let of = |what: &str, value: Option<String>| value.map(|value| format!("{what} {value}"));
        let node = [
            of("program", page.program.clone()),
            of("hub", page.hub.map(|hub| hub.to_string())),
            of("slot", page.slot.map(|slot| slot.to_string())),
            page.held.map(|held| {
                let connections = counted(held.connections, "connection");
                format!("{connections}, {} held", counted(held.requests, "request"))
            }),
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
        for (at, event) in page.events.iter().enumerate() {
            self.labelled(if at == 0 { "events" } else { "" }, &event.to_string(), self.look.waits());
        }
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

/// Like [`plain`], for paper: without the keys, and without the empty lines that push them to the end of a screen.
#[must_use]
pub fn printed(screen: &Screen, size: (u16, u16), look: TerminalStyle) -> String {
    let text = plain(screen, size, look);
    let content = match (&screen.away, text.trim_end().rsplit_once('\n')) {
        (None, Some((content, _keys))) => content,
        _ => &text,
    };
    let mut kept: Vec<&str> = content.trim_end().lines().collect();
    kept.dedup_by(|next, before| next.is_empty() && before.is_empty());
    format!("{}\n", kept.join("\n"))
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

// The node: figures, and the list of VMs.

/// Limit on the lines that workers fill, and on those of problems.
const WORKER_LINES: usize = 3;
const PROBLEM_LINES: usize = 2;
/// Characters of a worker's bar.
const LOAD: usize = 10;
/// Width of one worker's figures.
const WORKER: usize = 40;

/// Least width of the last column, where a line has so much.
const LAST_LEAST: usize = 16;

/// A column of the list.
struct Column {
    title: &'static str,
    /// Its width is that of its longest text, within these.
    widths: RangeInclusive<usize>,
    /// The least width of a screen that shows it.
    from: usize,
    right: bool,
    text: fn(&VmRow) -> String,
}

/// The columns between the name and the last one, which share the rest of the line.
const COLUMNS: [Column; 10] = [
    Column { title: "PORT", widths: 8..=24, from: 110, right: false, text: |row| row.port.clone() },
    Column { title: "MAC", widths: 17..=17, from: 140, right: false, text: |row| row.mac.clone() },
    Column { title: "STAGE", widths: 10..=10, from: 40, right: false, text: |row| row.stage.name().into() },
    Column {
        title: "DIALECT",
        widths: 7..=12,
        from: 60,
        right: false,
        text: |row| row.dialect.clone().unwrap_or_default(),
    },
    Column {
        title: "UD",
        widths: 3..=3,
        from: 80,
        right: false,
        text: |row| if row.has_user_data { "yes" } else { "" }.into(),
    },
    Column { title: "REQS", widths: 5..=7, from: 50, right: true, text: |row| some(row, row.requests) },
    Column { title: "FAIL", widths: 4..=7, from: 100, right: true, text: |row| some(row, row.failed) },
    Column {
        title: "FIRST",
        widths: 5..=5,
        from: 100,
        right: true,
        text: |row| row.boot.or(row.first).map(time).unwrap_or_default(),
    },
    Column {
        title: "LAST",
        widths: 5..=5,
        from: 70,
        right: true,
        text: |row| row.last.map(time).unwrap_or_default(),
    },
    Column {
        title: "ST",
        widths: 3..=3,
        from: 80,
        right: true,
        text: |row| row.status.map(|it| it.to_string()).unwrap_or_default(),
    },
];

/// The columns that a screen shows, with their widths, for its rows. The widths follow all listed rows and not only
/// those in view, so that moving the selection moves no column.
struct Widths {
    name: usize,
    columns: Vec<(&'static Column, usize)>,
    last: usize,
}

impl Widths {
    fn of(rows: &[VmRow], width: usize) -> Self {
        let longest = |text: &dyn Fn(&VmRow) -> String| {
            rows.iter().map(|row| text(row).chars().count()).max().unwrap_or_default()
        };
        let shown = COLUMNS.iter().filter(|column| width >= column.from);
        let columns: Vec<_> = shown
            .map(|column| {
                let (least, most) = column.widths.clone().into_inner();
                (column, longest(&column.text).clamp(least, most))
            })
            .collect();
        let taken: usize = columns.iter().map(|(_, width)| width + 1).sum();
        // Where both do not fit, the last column has a third unless the name leaves it more.
        let free = width.saturating_sub(taken + 1);
        let (name, last) = (longest(&|row| row.name().to_owned()).max(2), longest(&what).max(4));
        let name = name.min(free.saturating_sub(last.min((free / 3).max(LAST_LEAST))));
        Self { name, columns, last: free.saturating_sub(name) }
    }
}

/// Breaks a text at spaces into lines of at most `width` characters. A longer word has a line of its own.
fn wrapped(text: &str, width: usize) -> Vec<&str> {
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some((end, _)) = rest.char_indices().nth(width) {
        let fits = if rest[end..].starts_with(' ') { Some(end) } else { rest[..end].rfind(' ') };
        let Some(space) = fits.or_else(|| rest.find(' ')) else { break };
        lines.push(&rest[..space]);
        rest = &rest[space + 1..];
    }
    lines.push(rest);
    lines
}

fn some(row: &VmRow, number: u64) -> String {
    if row.first.is_some() { number.to_string() } else { String::new() }
}

/// The last column.
fn what(row: &VmRow) -> String {
    match &row.waits_for {
        Some(reason) if row.port_error => reason.clone(),
        Some(what) => format!("waits: {what}"),
        None => row.path.clone().unwrap_or_default(),
    }
}

impl Page<'_> {
    fn node(&mut self, screen: &Screen, top: &Top) {
        self.figures(top);
        self.workers(&top.workers);
        for problem in top.troubles.iter().take(PROBLEM_LINES) {
            let text = self.look.shorten(problem, self.width().saturating_sub(LABEL));
            self.labelled("problem", &text, self.look.bad());
        }
        if let Some(more) = top.troubles.len().checked_sub(PROBLEM_LINES).filter(|more| *more > 0) {
            self.labelled("", &format!("and {more} more: see `xdp-imds status`"), self.look.bad());
        }
        self.list(screen, top);
    }

    fn figures(&mut self, top: &Top) {
        let traffic = &top.traffic;
        let failed = match traffic.failed_per_second {
            Some(failed) if failed > 0.0 => format!(", {} failed", rate(failed)),
            _ => String::new(),
        };
        let now = traffic.per_second.map_or("...".into(), rate);
        let text = format!("{now}, {} in all{failed}", count(traffic.requests));
        let free = self.width().saturating_sub(LABEL + text.chars().count() + 2);
        let mut history = bars(&traffic.history, free.min(60), self.look.bars());
        // A scale where there is room: the seconds that the bars cover, and what the highest stands for.
        let most = traffic.history.iter().max().copied().unwrap_or_default();
        let scale = format!("{} s, at most {}/s ", traffic.history.len(), count(most));
        if free >= 60 + scale.len() && !traffic.history.is_empty() {
            history.insert_str(0, &scale);
        }
        let from = self.width().saturating_sub(history.chars().count());
        if self.room() > 0 {
            self.put(from, &history, self.width(), self.look.busy());
        }
        self.labelled("requests", &text, Style::new());
        let text = top.latency.map_or("no answers lately".into(), |it| {
            let [p50, p90, p99, most] = [it.p50_us, it.p90_us, it.p99_us, it.most_us].map(bound);
            format!("p50 {p50}, p90 {p90}, p99 {p99}, slowest {most}")
        });
        self.labelled("latency", &text, Style::new());
        let parked = top.parked.iter().filter(|(_, number)| **number > 0);
        let parked: Vec<_> =
            parked.map(|(reason, number)| format!("{} for {reason}", count(*number))).collect();
        self.labelled("parked", &or_none(&parked.join(", ")), Style::new());
        let grows = top.drops.iter().any(|drop| drop.per_second > 0.0);
        let drops: Vec<_> = top
            .drops
            .iter()
            .map(|drop| {
                let text = format!("{} {}", drop.reason, count(drop.count));
                if drop.per_second > 0.0 { format!("{text} ({})", rate(drop.per_second)) } else { text }
            })
            .collect();
        let style = if grows { self.look.bad() } else { Style::new() };
        self.labelled("drops", &or_none(&drops.join(", ")), style);
    }

    /// Several workers on a line, as many as fit.
    fn workers(&mut self, workers: &[WorkerStatus]) {
        let per_line = (self.width().saturating_sub(LABEL) / WORKER).max(1);
        for (at, line) in workers.chunks(per_line).take(WORKER_LINES).enumerate() {
            if self.room() == 0 {
                return;
            }
            self.put(0, if at == 0 { "workers" } else { "" }, LABEL, self.look.strong());
            for (at, worker) in line.iter().enumerate() {
                let ended = worker.heartbeat.is_none();
                let style = if ended { self.look.bad() } else { Style::new() };
                self.put(LABEL + at * WORKER, &worker_figures(worker), WORKER - 1, style);
            }
            self.y += 1;
        }
        if let Some(more) = workers.len().checked_sub(WORKER_LINES * per_line).filter(|more| *more > 0) {
            self.labelled("", &format!("and {more} more"), Style::new());
        }
    }

    fn list(&mut self, screen: &Screen, top: &Top) {
        self.labelled("VMs", &vms(top, &screen.query.filter), Style::new());
        if self.room() == 0 {
            return;
        }
        let widths = Widths::of(&top.vms, self.width());
        self.cells(&widths, |column| column.title.to_owned(), ("VM", "PATH".into()), self.look.strong());
        let room = self.room();
        // The selection stays in view.
        let first = (screen.selected + 1).saturating_sub(room);
        for (at, row) in top.vms.iter().enumerate().skip(first).take(room) {
            let mut style = match row.stage {
                BootStage::Unattached if row.port_error => self.look.bad(),
                BootStage::Unrecorded => self.look.waits(),
                BootStage::Asking => self.look.busy(),
                BootStage::Unattached | BootStage::Quiet | BootStage::Silent | BootStage::Gone => {
                    Style::new()
                }
            };
            if at == screen.selected {
                style = style.add_modifier(Modifier::REVERSED);
            }
            let last = match &row.waits_for {
                Some(_) => self.look.shorten(&what(row), widths.last),
                None => self.look.shorten_middle(&what(row), widths.last),
            };
            self.cells(&widths, |column| (column.text)(row), (row.name(), last), style);
        }
    }

    /// Writes a line of cells: the name, the columns, and the last one.
    fn cells(
        &mut self,
        widths: &Widths,
        text: impl Fn(&Column) -> String,
        (name, last): (&str, String),
        style: Style,
    ) {
        let line = Rect { y: self.y, height: 1, ..self.area };
        self.into.set_style(line.intersection(self.area), style);
        self.put(0, &self.look.shorten_middle(name, widths.name), widths.name, style);
        let mut x = widths.name + 1;
        for (column, width) in &widths.columns {
            let text = self.look.shorten(&text(column), *width);
            let blank = if column.right { width.saturating_sub(text.chars().count()) } else { 0 };
            self.put(x + blank, &text, width - blank, style);
            x += width + 1;
        }
        self.put(x, &last, widths.last, style);
        self.y += 1;
    }
}

fn worker_figures(worker: &WorkerStatus) -> String {
    if worker.heartbeat.is_none() {
        return format!("hub {} has ended", worker.hub);
    }
    let load = worker.load.clamp(0.0, 1.0);
    let full = (load * LOAD as f64).round() as usize;
    format!(
        "hub {} [{}{}] {:>3.0} %, {} conns",
        worker.hub,
        "#".repeat(full),
        ".".repeat(LOAD - full),
        100.0 * load,
        count(worker.connections)
    )
}

/// The VMs by stage, after how many of them are listed.
fn vms(top: &Top, filter: &str) -> String {
    let all: u64 = top.stages.values().sum();
    let mut text = count(all);
    if !filter.is_empty() {
        text.push_str(&format!(", {} match `{filter}`", count(top.matching)));
    }
    let listed = top.vms.len() as u64;
    if listed < top.matching {
        text.push_str(&format!(", {} listed", count(listed)));
    }
    let some = top.stages.iter().filter(|(_, number)| **number > 0);
    let each: Vec<_> = some.map(|(stage, number)| format!("{} {}", count(*number), stage.name())).collect();
    if each.is_empty() { text } else { format!("{text}: {}", each.join(", ")) }
}

fn or_none(text: &str) -> String {
    if text.is_empty() { "none".into() } else { text.into() }
}

// Numbers and times as people read them.

/// A count with separators: `12,345`.
fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A rate: with one digit after the point below 10.
fn rate(each_second: f64) -> String {
    if each_second > 0.0 && each_second < 9.95 {
        format!("{each_second:.1}/s")
    } else {
        format!("{}/s", count(each_second.round() as u64))
    }
}

/// A time in seconds, in at most six characters.
fn time(seconds: f64) -> String {
    match seconds {
        short if short < 9.95 => format!("{:.1} s", short.max(0.0)),
        short if short < 99.5 => format!("{short:.0} s"),
        long if long < 6_000.0 => format!("{:.0} m", long / 60.0),
        long if long < 359_400.0 => format!("{:.0} h", long / 3_600.0),
        long => format!("{:.0} d", long / 86_400.0),
    }
}

/// A bound in microseconds; `None` is beyond the largest bucket, which ends at a second.
fn bound(us: Option<u64>) -> String {
    us.map_or_else(|| "over 1 s".into(), micros)
}

/// A time in microseconds.
fn micros(us: u64) -> String {
    match us {
        0..1_000 => format!("{us} us"),
        1_000..1_000_000 => format!("{} ms", trimmed(us as f64 / 1_000.0)),
        _ => format!("{} s", trimmed(us as f64 / 1_000_000.0)),
    }
}

fn trimmed(number: f64) -> String {
    let text = format!("{number:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
}

/// A number of bytes with its unit.
fn byte_size(number: u64) -> String {
    match number {
        0..10_240 => format!("{number} B"),
        10_240..10_485_760 => format!("{} KiB", number >> 10),
        _ => format!("{} MiB", number >> 20),
    }
}

/// A line of bars, one for each count, the newest last; at most `width`.
fn bars(counts: &[u64], width: usize, bars: &[&str]) -> String {
    let shown = &counts[counts.len().saturating_sub(width)..];
    let most = shown.iter().copied().max().unwrap_or_default().max(1);
    let full = bars.len() as u64 - 1;
    let bar =
        |count: &u64| bars[usize::try_from(count.saturating_mul(full).div_ceil(most)).unwrap_or_default()];
    shown.iter().map(bar).collect()
}

#[cfg(test)]
mod tests {
    use super::{bars, bound, byte_size, count, micros, rate, time, wrapped};

    #[test]
    fn a_long_text_is_broken_at_spaces() {
        for (text, width, expected) in [
            ("", 8, &[""][..]),
            ("as wide as", 10, &["as wide as"]),
            ("as wide as", 9, &["as wide", "as"]),
            ("as wide as", 7, &["as wide", "as"]),
            ("ein längerer Text", 12, &["ein längerer", "Text"]),
            ("ein längerer Text", 5, &["ein", "längerer", "Text"]),
            ("unbreakable", 4, &["unbreakable"]),
            ("a b", 0, &["a", "b"]),
        ] {
            assert_eq!(wrapped(text, width), expected, "{text} at {width}");
        }
    }

    #[test]
    fn figures_are_short() {
        let counts = [(0, "0"), (999, "999"), (1_000, "1,000"), (1_234_567, "1,234,567")];
        counts.iter().for_each(|(number, text)| assert_eq!(count(*number), *text));
        let rates = [(0.0, "0/s"), (0.25, "0.2/s"), (9.94, "9.9/s"), (9.95, "10/s"), (12_345.4, "12,345/s")];
        rates.iter().for_each(|(number, text)| assert_eq!(rate(*number), *text));
        let times = [
            (-1.0, "0.0 s"),
            (9.94, "9.9 s"),
            (99.4, "99 s"),
            (100.0, "2 m"),
            (7_200.0, "2 h"),
            (864_000.0, "10 d"),
        ];
        times.iter().for_each(|(seconds, text)| assert_eq!(time(*seconds), *text));
        let bounds =
            [(Some(50), "50 us"), (Some(2_500), "2.5 ms"), (Some(1_000_000), "1 s"), (None, "over 1 s")];
        bounds.iter().for_each(|(us, text)| assert_eq!(bound(*us), *text));
        assert_eq!(micros(10_000), "10 ms");
        let sizes = [(300, "300 B"), (65_536, "64 KiB"), (20 << 20, "20 MiB")];
        sizes.iter().for_each(|(number, text)| assert_eq!(byte_size(*number), *text));
    }

    #[test]
    fn the_highest_bar_is_full_and_only_zero_is_empty() {
        let shapes = [" ", ".", ":", "#"];
        for (counts, width, text) in [
            (&[][..], 5, ""),
            (&[0, 0], 5, "  "),
            (&[0, 1, 50, 100], 5, " .:#"),
            (&[100, 1, 2, 3], 3, ".:#"),
            (&[u64::MAX, 0], 5, ". "),
        ] {
            assert_eq!(bars(counts, width, &shapes), text, "{counts:?}");
        }
    }
}
