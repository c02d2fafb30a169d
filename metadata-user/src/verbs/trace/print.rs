//! Prints a trace: one line per frame, and a table at the end.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::time::Duration;

use metadata_common::printable::Printable;
use serde::Serialize;

use metadata_common::verdict::{Fate, Verdict};

use metadata_control::trace::sketch;
use metadata_control::trace::wire::{TracedFrame, bytes};

/// The name and version of the lines of `--json`. The version rises when a member is removed or changes its meaning.
pub(super) const SCHEMA: &str = "trace-lines/1";

/// A line of `--json`. A reader ignores lines of a kind it does not know.
#[derive(Debug, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(super) enum JsonLine<'a> {
    /// The first line.
    Begin {
        schema: &'static str,
        /// The traced guests, in words.
        who: &'a str,
        /// Why the guests get no answers, if the agent knows it.
        problem: Option<&'a str>,
        /// What the trace misses.
        unseen: Option<&'a str>,
    },
    /// A frame.
    Frame {
        /// Seconds since the first line.
        seconds: f64,
        to_guest: bool,
        /// The verdict by its name in the metrics, and in words.
        verdict: &'a str,
        words: String,
        bytes: u32,
        port: Option<&'a str>,
        mac: &'a str,
        /// Addresses, ports and flags. Never header fields or bodies.
        summary: String,
        /// The request or status line, if a message starts in the frame.
        message: Option<&'a str>,
    },
    /// Frames lost before the next line.
    Lost { frames: u64 },
    /// The last line.
    End {
        /// Why the agent has ended the trace; `None` if this command did.
        reason: Option<&'a str>,
        frames: u64,
        lost: u64,
        verdicts: Vec<JsonVerdict<'a>>,
    },
}

/// The frames of one verdict.
#[derive(Debug, Serialize)]
pub(super) struct JsonVerdict<'a> {
    to_guest: bool,
    verdict: &'a str,
    frames: u64,
    bytes: u64,
}

/// Writes a line of JSON.
pub(super) fn json(line: &JsonLine<'_>, out: &mut dyn Write) -> io::Result<()> {
    serde_json::to_writer(&mut *out, line)?;
    writeln!(out)
}

/// Describes a verdict in words.
pub(super) fn verdict(name: &str) -> String {
    let Some(verdict) = Verdict::ALL.iter().find(|verdict| verdict.name() == name) else {
        return name.into();
    };
    let deed = match verdict.fate() {
        Fate::Pass => "passed",
        Fate::Steer if name == Verdict::HubDelivered.name() => return "delivered to the guest".into(),
        Fate::Steer => "steered to the agent",
        Fate::Answer => "answered by the kernel",
        Fate::Absorb => "taken by the kernel",
        Fate::Drop => "DROPPED",
    };
    let why = name
        .trim_start_matches("hub_")
        .trim_start_matches("socket_")
        .split_once('_')
        .map_or(name, |(_, why)| why)
        .replace('_', " ");
    format!("{deed}: {why}")
}

/// The counts so far.
#[derive(Debug, Default)]
pub(super) struct TraceCounts {
    began_ns: u64,
    verdicts: BTreeMap<(bool, String), (u64, u64)>,
    lost: u64,
}

impl TraceCounts {
    pub(super) fn begin(&mut self, monotonic_ns: u64) {
        self.began_ns = monotonic_ns;
    }

    pub(super) fn lose(&mut self, frames: u64) {
        self.lost = self.lost.saturating_add(frames);
    }

    /// Counts a frame.
    pub(super) fn count(&mut self, frame: &TracedFrame) {
        let key = (frame.to_guest, frame.verdict.clone());
        let (frames, length) = self.verdicts.entry(key).or_default();
        *frames += 1;
        *length += u64::from(frame.length);
    }

    /// Writes the line of a frame.
    pub(super) fn print(&self, frame: &TracedFrame, out: &mut dyn Write) -> io::Result<()> {
        let micros = frame.time_ns.saturating_sub(self.began_ns) / 1_000;
        let (seconds, micros) = (micros / 1_000_000, micros % 1_000_000);
        let way = way(frame.to_guest);
        let captured = bytes(&frame.bytes).unwrap_or_default();
        let message = match &frame.message {
            Some(message) => format!("  {message}"),
            None if frame.verdict == Verdict::DropUnknownMac.name() => {
                let port = frame.port.as_deref().unwrap_or("this port");
                format!("  no record has MAC {} on {port}", frame.mac)
            }
            None => String::new(),
        };
        let line = format!(
            "{seconds:>5}.{micros:06}  {way}  {:<36} {:>5}  {}{message}",
            verdict(&frame.verdict),
            frame.length,
            sketch::words(&captured)
        );
        writeln!(out, "{}", Printable(line))
    }

    /// Writes the JSON of a frame.
    pub(super) fn print_json(&self, frame: &TracedFrame, out: &mut dyn Write) -> io::Result<()> {
        let line = JsonLine::Frame {
            seconds: Duration::from_nanos(frame.time_ns.saturating_sub(self.began_ns)).as_secs_f64(),
            to_guest: frame.to_guest,
            verdict: &frame.verdict,
            words: verdict(&frame.verdict),
            bytes: frame.length,
            port: frame.port.as_deref(),
            mac: &frame.mac,
            summary: sketch::words(&bytes(&frame.bytes).unwrap_or_default()).to_string(),
            message: frame.message.as_deref(),
        };
        json(&line, out)
    }

    /// Writes the last line of JSON.
    pub(super) fn end_json(&self, reason: Option<&str>, out: &mut dyn Write) -> io::Result<()> {
        let verdicts = self.verdicts.iter().map(|((to_guest, verdict), (frames, bytes))| JsonVerdict {
            to_guest: *to_guest,
            verdict,
            frames: *frames,
            bytes: *bytes,
        });
        let frames = self.verdicts.values().map(|(frames, _)| frames).sum();
        json(&JsonLine::End { reason, frames, lost: self.lost, verdicts: verdicts.collect() }, out)
    }

    /// Writes the table of verdicts.
    pub(super) fn summary(&self, out: &mut dyn Write) -> io::Result<()> {
        let all: u64 = self.verdicts.values().map(|(frames, _)| frames).sum();
        writeln!(out, "\n{:>9}  {:>11}  way     verdict", "frames", "bytes")?;
        for ((to_guest, name), (frames, length)) in &self.verdicts {
            writeln!(out, "{frames:>9}  {length:>11}  {}  {}", way(*to_guest), Printable(verdict(name)))?;
        }
        writeln!(out, "{all:>9}  frames seen, {} lost", self.lost)
    }
}

fn way(to_guest: bool) -> &'static str {
    if to_guest { "→guest" } else { "guest→" }
}

#[cfg(test)]
mod tests {
    use super::{JsonLine, SCHEMA, TraceCounts, json, verdict};
    use metadata_control::trace::wire::TracedFrame;

    #[test]
    fn verdicts_are_described_in_words() {
        let cases = [
            ("pass_ipv4", "passed: ipv4"),
            ("steer_ipv4_tcp", "steered to the agent: ipv4 tcp"),
            ("answer_syn", "answered by the kernel: syn"),
            ("absorb_ack", "taken by the kernel: ack"),
            ("drop_unknown_mac", "DROPPED: unknown mac"),
            ("hub_delivered", "delivered to the guest"),
            ("hub_drop_truncated", "DROPPED: truncated"),
            ("of_a_newer_agent", "of_a_newer_agent"),
        ];
        for (name, words) in cases {
            assert_eq!(verdict(name), words, "{name}");
        }
    }

    #[test]
    fn frames_are_counted_by_direction_and_verdict() {
        let mut tally = TraceCounts::default();
        tally.begin(1_000_000);
        let frame = TracedFrame {
            time_ns: 2_234_567,
            verdict: "drop_vlan".into(),
            length: 60,
            ..TracedFrame::default()
        };
        let mut lines = Vec::new();
        for to_guest in [false, false, true] {
            let frame = TracedFrame { to_guest, ..frame.clone() };
            tally.count(&frame);
            tally.print(&frame, &mut lines).expect("written");
        }
        let stranger = TracedFrame {
            verdict: "drop_unknown_mac".into(),
            port: Some("vnet0".into()),
            mac: "52:54:00:00:00:56".into(),
            ..frame
        };
        TraceCounts::default().print(&stranger, &mut lines).expect("written");
        tally.lose(4);
        let lines = String::from_utf8(lines).expect("text");
        assert!(lines.starts_with("    0.001234  guest→  DROPPED: vlan "), "{lines}");
        assert!(lines.contains("  no record has MAC 52:54:00:00:00:56 on vnet0\n"), "{lines}");
        let mut table = Vec::new();
        tally.summary(&mut table).expect("written");
        let table = String::from_utf8(table).expect("text");
        assert!(table.contains("        2          120  guest→  DROPPED: vlan"), "{table}");
        assert!(table.ends_with("        3  frames seen, 4 lost\n"), "{table}");
    }

    #[test]
    fn lines_of_json_have_the_members_of_their_schema() {
        let mut tally = TraceCounts::default();
        tally.begin(1_000_000);
        tally.lose(4);
        let frame = TracedFrame {
            time_ns: 501_000_000,
            verdict: "drop_vlan".into(),
            length: 60,
            mac: "52:54:00:00:00:56".into(),
            bytes: "00ff".into(),
            ..TracedFrame::default()
        };
        tally.count(&frame);
        let mut out = Vec::new();
        let begin = JsonLine::Begin { schema: SCHEMA, who: "web", problem: None, unseen: Some("answers") };
        json(&begin, &mut out).expect("written");
        tally.print_json(&frame, &mut out).expect("written");
        json(&JsonLine::Lost { frames: 4 }, &mut out).expect("written");
        tally.end_json(Some("an hour"), &mut out).expect("written");
        let text = String::from_utf8(out).expect("text");
        let mut lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        lines[1]["summary"].take();
        let expected = [
            serde_json::json!(
                {"kind": "begin", "schema": "trace-lines/1", "who": "web", "problem": null, "unseen": "answers"}
            ),
            serde_json::json!({
                "kind": "frame", "seconds": 0.5, "to_guest": false, "verdict": "drop_vlan", "words": "DROPPED: vlan",
                "bytes": 60, "port": null, "mac": "52:54:00:00:00:56", "summary": null, "message": null,
            }),
            serde_json::json!({"kind": "lost", "frames": 4}),
            serde_json::json!({
                "kind": "end", "reason": "an hour", "frames": 1, "lost": 4,
                "verdicts": [{"to_guest": false, "verdict": "drop_vlan", "frames": 1, "bytes": 60}],
            }),
        ];
        assert_eq!(lines, expected, "{text}");
    }
}
