//! Prints a trace: one line per frame, and a table at the end.

use std::collections::BTreeMap;
use std::io::{self, Write};

use metadata_base::printable::Printable;
use metadata_common::verdict::{Fate, Verdict};

use metadata_control::trace::sketch;
use metadata_control::trace::wire::{Frame, octets};

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
pub(super) struct Tally {
    began_ns: u64,
    verdicts: BTreeMap<(bool, String), (u64, u64)>,
    lost: u64,
}

impl Tally {
    pub(super) fn begin(&mut self, monotonic_ns: u64) {
        self.began_ns = monotonic_ns;
    }

    pub(super) fn lose(&mut self, frames: u64) {
        self.lost = self.lost.saturating_add(frames);
    }

    /// Counts a frame and writes its line.
    pub(super) fn frame(&mut self, frame: &Frame, out: &mut dyn Write) -> io::Result<()> {
        let key = (frame.to_guest, frame.verdict.clone());
        let (frames, length) = self.verdicts.entry(key).or_default();
        *frames += 1;
        *length += u64::from(frame.length);
        let micros = frame.time_ns.saturating_sub(self.began_ns) / 1_000;
        let (seconds, micros) = (micros / 1_000_000, micros % 1_000_000);
        let way = way(frame.to_guest);
        let captured = octets(&frame.octets).unwrap_or_default();
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

    /// Writes the table of verdicts.
    pub(super) fn summary(&self, out: &mut dyn Write) -> io::Result<()> {
        let all: u64 = self.verdicts.values().map(|(frames, _)| frames).sum();
        writeln!(out, "\n{:>9}  {:>11}  way     verdict", "frames", "octets")?;
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
    use super::{Tally, verdict};
    use metadata_control::trace::wire::Frame;

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
        let mut tally = Tally::default();
        tally.begin(1_000_000);
        let frame = Frame { time_ns: 2_234_567, verdict: "drop_vlan".into(), length: 60, ..Frame::default() };
        let mut lines = Vec::new();
        for to_guest in [false, false, true] {
            tally.frame(&Frame { to_guest, ..frame.clone() }, &mut lines).expect("written");
        }
        let stranger = Frame {
            verdict: "drop_unknown_mac".into(),
            port: Some("vnet0".into()),
            mac: "52:54:00:00:00:56".into(),
            ..frame
        };
        Tally::default().frame(&stranger, &mut lines).expect("written");
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
}
