//! Kernel and user counters joined, as Prometheus text
//! (<https://prometheus.io/docs/instrumenting/exposition_formats/>, version 0.0.4).
//!
//! A pure function of what it is given: whoever serves `/metrics` gathers a [`Snapshot`] and sends what
//! [`render`] makes of it. [`Exposition`] takes further families, one after the other.

use std::fmt::{self, Write as _};
use std::time::Duration;

use crate::agent::Reloads;
use crate::mailbox::MailboxCounts;
use crate::sink::SinkCounts;
use crate::worker::WorkerStats;

/// The `Content-Type` of the text.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Whether a family only ever grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Grows until the agent restarts; its name ends in `_total`.
    Counter,
    /// Goes up and down.
    Gauge,
}

/// One hub's worker.
#[derive(Clone, Debug)]
pub struct Hub<'a, T> {
    /// The hub's number.
    pub number: u32,
    /// Its worker's counters.
    pub worker: WorkerStats<T>,
    /// The engine's counters, by name (`snake_case`, without prefix or suffix).
    pub counters: &'a [(&'static str, u64)],
    /// The engine's gauges, likewise.
    pub gauges: &'a [(&'static str, u64)],
}

/// Everything counted, at one moment.
#[derive(Clone, Debug)]
pub struct Snapshot<'a, T> {
    /// Frames the kernel side decided on, by the verdict's name.
    pub verdicts: &'a [(&'static str, u64)],
    /// Ports attached.
    pub ports: u64,
    /// Of these, how many each program steers, by its name.
    pub steered_by: [(&'static str, u64); 2],
    /// Identities bound.
    pub identities: u64,
    /// Attachments so far.
    pub attaching: Attaching,
    /// Time spent on rendering records.
    pub rendering: Duration,
    /// Records held.
    pub records: u64,
    /// Records refused since the start.
    pub records_rejected: u64,
    /// Times the configuration was read again.
    pub config_reloads: Reloads,
    /// What became of messages from guests, and of what is kept for them.
    pub errands: Errands,
    /// The hubs.
    pub hubs: &'a [Hub<'a, T>],
}

/// How long attaching ports has taken, from the look at the port until its guest is bound.
#[derive(Clone, Copy, Debug, Default)]
pub struct Attaching {
    /// Ports attached since the start, those that have gone included.
    pub count: u64,
    /// What all of them took.
    pub total: Duration,
    /// The median of the last few thousand.
    pub median: Duration,
}

/// What is done for guests beside answering them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Errands {
    /// Messages on their way to sinks.
    pub messages: SinkCounts,
    /// What guests wrote.
    pub mailboxes: MailboxCounts,
}

/// The text of a snapshot.
#[must_use]
pub fn render<T>(snapshot: &Snapshot<'_, T>) -> String {
    let mut out = Exposition::default();
    let verdicts = snapshot.verdicts.iter().map(|(name, count)| ([("verdict", *name)], *count));
    out.family(
        "xdp_imds_frames_total",
        "Frames on owned ports and hubs, by verdict.",
        Kind::Counter,
        verdicts,
    );
    let none: [(&str, &str); 0] = [];
    out.family("xdp_imds_ports", "Ports attached.", Kind::Gauge, [(none, snapshot.ports)]);
    let steered = snapshot.steered_by.map(|(program, ports)| ([("program", program)], ports));
    out.family("xdp_imds_ports_steered", "Ports by the program that steers them.", Kind::Gauge, steered);
    out.family("xdp_imds_identities", "Identities bound.", Kind::Gauge, [(none, snapshot.identities)]);
    attaching(&snapshot.attaching, &mut out);
    out.family(
        "xdp_imds_render_seconds_total",
        "Time spent on rendering records.",
        Kind::Counter,
        [(none, Seconds(snapshot.rendering))],
    );
    out.family("xdp_imds_records", "Records held.", Kind::Gauge, [(none, snapshot.records)]);
    let rejected = [(none, snapshot.records_rejected)];
    out.family(
        "xdp_imds_records_rejected_total",
        "Records refused; the last good one stays.",
        Kind::Counter,
        rejected,
    );
    let Reloads { done, failed } = snapshot.config_reloads;
    out.family(
        "xdp_imds_config_reloads_total",
        "Times the configuration was read again; one that failed changed nothing.",
        Kind::Counter,
        [([("outcome", "done")], done), ([("outcome", "failed")], failed)],
    );
    errands(&snapshot.errands, &mut out);
    let numbers: Vec<String> = snapshot.hubs.iter().map(|hub| hub.number.to_string()).collect();
    let hubs = Hubs { hubs: snapshot.hubs, numbers: &numbers };
    hubs.received(&mut out);
    hubs.sent(&mut out);
    hubs.turns(&mut out);
    hubs.engine(&mut out);
    out.text
}

fn attaching(Attaching { count, total, median }: &Attaching, out: &mut Exposition) {
    let none: [(&str, &str); 0] = [];
    let (name, help) = ("xdp_imds_attached_total", "Ports attached since the start.");
    out.family(name, help, Kind::Counter, [(none, *count)]);
    let (name, help) =
        ("xdp_imds_attach_seconds_total", "Time it took to attach them and bind their guests.");
    out.family(name, help, Kind::Counter, [(none, Seconds(*total))]);
    let (name, help) = ("xdp_imds_attach_seconds_median", "The median of the last 4096 of them.");
    out.family(name, help, Kind::Gauge, [(none, Seconds(*median))]);
}

fn errands(Errands { messages, mailboxes }: &Errands, out: &mut Exposition) {
    let none: [(&str, &str); 0] = [];
    out.family(
        "xdp_imds_messages_total",
        "Messages from guests to sinks, by what became of them.",
        Kind::Counter,
        [("delivered", messages.delivered), ("failed", messages.failed), ("dropped", messages.dropped)]
            .map(|(outcome, count)| ([("outcome", outcome)], count)),
    );
    let waiting = [(none, messages.waiting)];
    out.family("xdp_imds_messages_waiting", "Messages on their way to sinks.", Kind::Gauge, waiting);
    out.family(
        "xdp_imds_waits_ended_total",
        "Requests waiting for a change that were ended for a newer one of the same VM.",
        Kind::Counter,
        [(none, messages.waits_ended)],
    );
    out.family(
        "xdp_imds_state_errors_total",
        "Files of the state directory that could not be read or written.",
        Kind::Counter,
        [("load", mailboxes.loads_failed), ("save", mailboxes.saves_failed)]
            .map(|(operation, count)| ([("operation", operation)], count)),
    );
}

/// The hubs of a snapshot, with their numbers as text.
struct Hubs<'a, T> {
    hubs: &'a [Hub<'a, T>],
    numbers: &'a [String],
}

impl<'a, T> Hubs<'a, T> {
    fn each(&self) -> impl Iterator<Item = (&'a str, &'a Hub<'a, T>)> {
        self.numbers.iter().map(String::as_str).zip(self.hubs)
    }

    /// A family with one value per hub.
    fn one(&self, out: &mut Exposition, name: &str, help: &str, of: fn(&WorkerStats<T>) -> u64) {
        let samples = self.each().map(|(number, hub)| ([("hub", number)], of(&hub.worker)));
        out.family(name, help, Kind::Counter, samples);
    }

    /// A family of frames lost, with one value per hub and reason.
    fn lost<const N: usize>(
        &self,
        out: &mut Exposition,
        name: &str,
        help: &str,
        of: fn(&WorkerStats<T>) -> [(&'static str, u64); N],
    ) {
        let samples = self.each().flat_map(|(number, hub)| {
            of(&hub.worker).map(|(reason, count)| ([("hub", number), ("reason", reason)], count))
        });
        out.family(name, help, Kind::Counter, samples);
    }

    fn received(&self, out: &mut Exposition) {
        self.one(out, "xdp_imds_received_frames_total", "Frames received by the AF_XDP socket.", |w| {
            w.socket.frames
        });
        self.one(out, "xdp_imds_received_bytes_total", "Octets in those frames.", |w| w.socket.bytes);
        let help = "Frames lost before or at the AF_XDP socket, by reason.";
        self.lost(out, "xdp_imds_receive_lost_frames_total", help, |w| {
            [
                ("ring_full", w.socket.ring_full),
                ("dropped", w.socket.dropped),
                ("bad_descriptor", w.socket.bad_descriptors),
                ("runt", w.link.runt),
                ("unstamped", w.link.unstamped),
                ("slot_out_of_range", w.link.slot_out_of_range),
            ]
        });
        let help = "Times the kernel found no chunk in the fill ring.";
        self.one(out, "xdp_imds_fill_ring_empty_total", help, |w| w.socket.fill_ring_empty);
        let help = "Fill ring addresses the kernel refused.";
        self.one(out, "xdp_imds_fill_ring_invalid_total", help, |w| w.socket.invalid_fill);
    }

    fn sent(&self, out: &mut Exposition) {
        self.one(out, "xdp_imds_sent_frames_total", "Frames the hub tap took.", |w| w.tap.frames);
        self.one(out, "xdp_imds_sent_bytes_total", "Octets in those frames.", |w| w.tap.bytes);
        let help = "Frames the hub tap did not take, by reason.";
        self.lost(out, "xdp_imds_send_lost_frames_total", help, |w| {
            [
                ("full", w.tap.full),
                ("no_memory", w.tap.no_memory),
                ("down", w.tap.down),
                ("bad_length", w.tap.bad_length),
                ("other", w.tap.other),
            ]
        });
    }

    fn turns(&self, out: &mut Exposition) {
        self.one(out, "xdp_imds_worker_turns_total", "Turns of the worker's loop.", |w| w.turns.turns);
        let help = "Turns that received as many frames as a turn may.";
        self.one(out, "xdp_imds_worker_full_batches_total", help, |w| w.turns.full_batches);
        self.one(out, "xdp_imds_worker_sleeps_total", "Times the worker slept.", |w| w.turns.sleeps);
        self.one(out, "xdp_imds_worker_naps_total", "Times the busy worker let frames gather.", |w| {
            w.turns.naps
        });
        let help = "Slots the worker was told to forget.";
        self.one(out, "xdp_imds_worker_forgotten_total", help, |w| w.turns.forgotten);
        let help = "VMs whose waiting requests the worker was told to look at again.";
        self.one(out, "xdp_imds_worker_woken_total", help, |w| w.turns.woken);
        let of = |time: fn(&WorkerStats<T>) -> Duration| {
            self.each().map(move |(number, hub)| ([("hub", number)], Seconds(time(&hub.worker))))
        };
        let (name, help) = ("xdp_imds_worker_seconds_total", "Time since the worker started.");
        out.family(name, help, Kind::Counter, of(|w| w.turns.elapsed));
        let (name, help) = ("xdp_imds_worker_slept_seconds_total", "Part of that time spent asleep.");
        out.family(name, help, Kind::Counter, of(|w| w.turns.slept));
    }

    /// The engine's own names; a hub that lacks one of the first hub's has no sample of it.
    fn engine(&self, out: &mut Exposition) {
        let Some(first) = self.hubs.first() else { return };
        for (names, kind) in [(first.counters, Kind::Counter), (first.gauges, Kind::Gauge)] {
            for (name, _) in names {
                let samples = self.each().filter_map(|(number, hub)| {
                    let all = if kind == Kind::Counter { hub.counters } else { hub.gauges };
                    let (_, value) = all.iter().find(|(other, _)| other == name)?;
                    Some(([("hub", number)], *value))
                });
                let suffix = if kind == Kind::Counter { "_total" } else { "" };
                let help = format!("The stack's count of {}.", name.replace('_', " "));
                out.family(&format!("xdp_imds_stack_{name}{suffix}"), &help, kind, samples);
            }
        }
    }
}

/// A time in seconds, to the nanosecond.
struct Seconds(Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:09}", self.0.as_secs(), self.0.subsec_nanos())
    }
}

/// Text under construction.
#[derive(Clone, Debug, Default)]
pub struct Exposition {
    text: String,
}

impl Exposition {
    /// Adds a family: its head and one line per sample, a set of labels and a value. A family without
    /// samples is left out.
    pub fn family<'a, const N: usize, V: fmt::Display>(
        &mut self,
        name: &str,
        help: &str,
        kind: Kind,
        samples: impl IntoIterator<Item = ([(&'a str, &'a str); N], V)>,
    ) {
        let mut samples = samples.into_iter().peekable();
        if samples.peek().is_none() {
            return;
        }
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
        };
        let help = Escaped { text: help, quotes: false };
        self.line(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
        for (labels, value) in samples {
            self.text.push_str(name);
            for (i, (label, text)) in labels.into_iter().enumerate() {
                let open = if i == 0 { '{' } else { ',' };
                self.line(format_args!("{open}{label}=\"{}\"", Escaped { text, quotes: true }));
            }
            let close = if N == 0 { "" } else { "}" };
            self.line(format_args!("{close} {value}\n"));
        }
    }

    /// The text so far.
    #[must_use]
    pub fn into_text(self) -> String {
        self.text
    }

    fn line(&mut self, line: fmt::Arguments<'_>) {
        let written = self.text.write_fmt(line);
        debug_assert!(written.is_ok(), "a String takes everything");
    }
}

/// A help text or label value: backslash and line feed escaped, in label values the quote as well.
struct Escaped<'a> {
    text: &'a str,
    quotes: bool,
}

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.text.chars() {
            match c {
                '\\' => f.write_str("\\\\")?,
                '\n' => f.write_str("\\n")?,
                '"' if self.quotes => f.write_str("\\\"")?,
                c => f.write_char(c)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{Attaching, Errands, Exposition, Hub, Kind, Reloads, Snapshot, render};
    use crate::afxdp::SocketStats;
    use crate::link::{LinkStats, TapStats};
    use crate::mailbox::MailboxCounts;
    use crate::sink::SinkCounts;
    use crate::worker::{LoopStats, WorkerStats};
    use std::collections::HashSet;
    use std::time::Duration;

    fn worker() -> WorkerStats<()> {
        WorkerStats {
            turns: LoopStats {
                turns: 1,
                full_batches: 2,
                sleeps: 3,
                naps: 4,
                slept: Duration::from_micros(1_500_004),
                elapsed: Duration::from_secs(5),
                forgotten: 6,
                woken: 7,
            },
            socket: SocketStats {
                frames: 11,
                bytes: 12,
                bad_descriptors: 13,
                dropped: 14,
                ring_full: 15,
                fill_ring_empty: 16,
                invalid_fill: 17,
            },
            link: LinkStats { runt: 21, unstamped: 22, slot_out_of_range: 23 },
            tap: TapStats {
                frames: 31,
                bytes: 32,
                bad_length: 33,
                full: 34,
                no_memory: 35,
                down: 36,
                other: 37,
            },
            engine: (),
        }
    }

    fn text() -> String {
        let hub = |number, counters, gauges| Hub { number, worker: worker(), counters, gauges };
        let hubs =
            [hub(0, &[("segments", 41)][..], &[("connections", 42)][..]), hub(1, &[("segments", 43)], &[])];
        let verdicts = [("steered", 51), ("unknown_mac", 52)];
        render(&Snapshot {
            verdicts: &verdicts,
            ports: 61,
            steered_by: [("xdp", 21), ("tcx", 40)],
            identities: 62,
            records: 63,
            attaching: Attaching::default(),
            rendering: Duration::ZERO,
            records_rejected: 64,
            config_reloads: Reloads { done: 65, failed: 66 },
            errands: Errands {
                messages: SinkCounts { delivered: 71, failed: 72, dropped: 73, waiting: 74, waits_ended: 75 },
                mailboxes: MailboxCounts { saves_failed: 76, loads_failed: 77 },
            },
            hubs: &hubs,
        })
    }

    #[test]
    fn every_count_is_a_line() {
        let text = text();
        for line in [
            "xdp_imds_frames_total{verdict=\"steered\"} 51",
            "xdp_imds_frames_total{verdict=\"unknown_mac\"} 52",
            "xdp_imds_ports 61",
            "xdp_imds_ports_steered{program=\"xdp\"} 21",
            "xdp_imds_ports_steered{program=\"tcx\"} 40",
            "xdp_imds_identities 62",
            "xdp_imds_messages_total{outcome=\"delivered\"} 71",
            "xdp_imds_messages_total{outcome=\"failed\"} 72",
            "xdp_imds_messages_total{outcome=\"dropped\"} 73",
            "xdp_imds_messages_waiting 74",
            "xdp_imds_waits_ended_total 75",
            "xdp_imds_state_errors_total{operation=\"save\"} 76",
            "xdp_imds_state_errors_total{operation=\"load\"} 77",
            "xdp_imds_worker_turns_total{hub=\"0\"} 1",
            "xdp_imds_worker_full_batches_total{hub=\"0\"} 2",
            "xdp_imds_worker_sleeps_total{hub=\"0\"} 3",
            "xdp_imds_worker_naps_total{hub=\"0\"} 4",
            "xdp_imds_worker_slept_seconds_total{hub=\"0\"} 1.500004000",
            "xdp_imds_worker_seconds_total{hub=\"0\"} 5.000000000",
            "xdp_imds_worker_forgotten_total{hub=\"0\"} 6",
            "xdp_imds_worker_woken_total{hub=\"0\"} 7",
            "xdp_imds_received_frames_total{hub=\"0\"} 11",
            "xdp_imds_received_bytes_total{hub=\"0\"} 12",
            "xdp_imds_receive_lost_frames_total{hub=\"0\",reason=\"bad_descriptor\"} 13",
            "xdp_imds_receive_lost_frames_total{hub=\"0\",reason=\"dropped\"} 14",
            "xdp_imds_receive_lost_frames_total{hub=\"0\",reason=\"ring_full\"} 15",
            "xdp_imds_fill_ring_empty_total{hub=\"0\"} 16",
            "xdp_imds_fill_ring_invalid_total{hub=\"0\"} 17",
            "xdp_imds_receive_lost_frames_total{hub=\"0\",reason=\"runt\"} 21",
            "xdp_imds_receive_lost_frames_total{hub=\"0\",reason=\"unstamped\"} 22",
            "xdp_imds_receive_lost_frames_total{hub=\"1\",reason=\"slot_out_of_range\"} 23",
            "xdp_imds_sent_frames_total{hub=\"0\"} 31",
            "xdp_imds_sent_bytes_total{hub=\"0\"} 32",
            "xdp_imds_send_lost_frames_total{hub=\"0\",reason=\"bad_length\"} 33",
            "xdp_imds_send_lost_frames_total{hub=\"0\",reason=\"full\"} 34",
            "xdp_imds_send_lost_frames_total{hub=\"0\",reason=\"no_memory\"} 35",
            "xdp_imds_send_lost_frames_total{hub=\"0\",reason=\"down\"} 36",
            "xdp_imds_send_lost_frames_total{hub=\"1\",reason=\"other\"} 37",
            "xdp_imds_stack_segments_total{hub=\"0\"} 41",
            "xdp_imds_stack_connections{hub=\"0\"} 42",
            "xdp_imds_stack_segments_total{hub=\"1\"} 43",
        ] {
            assert!(text.lines().any(|other| other == line), "no `{line}` in\n{text}");
        }
    }

    #[test]
    fn every_family_has_one_head_before_its_samples_and_counters_end_in_total() {
        let (mut heads, mut current) = (HashSet::new(), String::new());
        for line in text().lines() {
            let words: Vec<_> = line.split(' ').collect();
            match words[..] {
                ["#", "HELP", name, ..] => {
                    assert!(heads.insert(name.to_owned()), "{name} twice");
                    current = name.to_owned();
                }
                ["#", "TYPE", name, kind] => {
                    assert_eq!(name, current);
                    assert_eq!(kind == "counter", name.ends_with("_total"), "{name}");
                }
                [sample, value] => {
                    assert_eq!(sample.split('{').next(), Some(&*current), "{line}");
                    assert!(value.parse::<f64>().is_ok(), "{line}");
                }
                _ => panic!("{line}"),
            }
        }
        assert!(heads.len() > 15);
    }

    #[test]
    fn texts_are_escaped() {
        let mut out = Exposition::default();
        out.family("x", "a\\b\n\"c\"", Kind::Gauge, [([("l", "a\\b\n\"c\"")], 1)]);
        let expected = "# HELP x a\\\\b\\n\"c\"\n# TYPE x gauge\nx{l=\"a\\\\b\\n\\\"c\\\"\"} 1\n";
        assert_eq!(out.into_text(), expected);
    }

    #[test]
    fn a_family_without_samples_is_left_out() {
        let text = render::<()>(&Snapshot {
            verdicts: &[],
            ports: 0,
            steered_by: [("xdp", 0), ("tcx", 0)],
            identities: 0,
            records: 0,
            records_rejected: 0,
            config_reloads: Reloads::default(),
            attaching: Attaching::default(),
            rendering: Duration::ZERO,
            errands: Errands::default(),
            hubs: &[],
        });
        assert!(text.starts_with("# HELP xdp_imds_ports "), "{text}");
        assert!(!text.contains("xdp_imds_frames_total") && !text.contains("{hub="), "{text}");
    }
}
