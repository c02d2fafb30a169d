//! A VM's own page.

use metadata_control::top::{SeenRequest, VmPage};
use ratatui::style::Style;

use super::Page;
use crate::figures::{count, micros, octets, time};

impl Page<'_> {
    pub(super) fn vm(&mut self, name: &str, pages: Option<&[VmPage]>) {
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
                octets(*bytes),
                micros(*us)
            );
            let failed = *status == 429 || *status >= 500;
            self.line(&text, if failed { self.look.bad() } else { Style::new() });
        }
    }
}
