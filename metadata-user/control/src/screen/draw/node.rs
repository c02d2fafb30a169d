//! The node: figures, and the list of VMs.

use std::ops::RangeInclusive;

use crate::status::WorkerStatus;
use crate::top::{BootStage, Top, VmRow};
use ratatui::style::{Modifier, Style};

use super::{LABEL, Page};
use crate::screen::Screen;
use crate::screen::figures::{bars, bound, count, rate, time};

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
    pub(super) fn node(&mut self, screen: &Screen, top: &Top) {
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
            .map(|drop| match drop.per_second > 0.0 {
                true => format!("{} {} ({})", drop.reason, count(drop.count), rate(drop.per_second)),
                false => format!("{} {}", drop.reason, count(drop.count)),
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
        let line = ratatui::layout::Rect { y: self.y, height: 1, ..self.area };
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
