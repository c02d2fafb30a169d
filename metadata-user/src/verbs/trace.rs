//! `xdp-imds trace`: prints each frame to and from one guest, with its verdict.
//!
//! The agent owns the eBPF maps, so the verb asks the agent over a socket in its run directory
//! ([`metadata_control::trace`]). The verb prints addresses, ports, flags and the first line of an HTTP message. It never prints header
//! fields or bodies, because they hold tokens and passwords. `--write` writes only headers, or with
//! `--payload` all captured bytes.

use anyhow::{Context as _, bail};
use metadata_common::printable::{Printable, counted};
use metadata_common::time;
use metadata_common::verdict::{Fate, Verdict};
use metadata_control::status::{ClientError, StatusRequest, StreamedResponse, open};
use metadata_control::trace::{SCHEMA, TraceLine, TracedFrame, describe_frame, parse_hex};
use pcap_file::pcapng::PcapNgWriter;
use pcap_file::pcapng::blocks::enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption};
use pcap_file::pcapng::blocks::interface_description::{
    InterfaceDescriptionBlock, InterfaceDescriptionOption,
};
use pcap_file::{DataLink, PcapError};
use serde::Serialize;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::io::{BufWriter, Cursor, Write};
use std::ops::RangeInclusive;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::net::UnixStream;
use tokio::signal::unix::{SignalKind, signal};

use super::options::{Agent, GUEST};
use crate::output;

/// Maximum time without data from the agent. The agent sends an empty line each second.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum size of a refusal, in bytes.
const REFUSAL_MOST: u64 = 4_096;
/// Maximum size of a trace, in bytes; an hour of frames takes far less.
const ANSWER_MOST: u64 = 64 << 30;

/// The options of `xdp-imds trace`.
#[derive(clap::Args, Debug)]
pub struct TraceArgs {
    /// The guest: its port, its MAC, or the name, UUID or record of its VM.
    ///
    /// A trace by port also shows frames from other MACs, but not the answers of the agent.
    #[arg(value_name = GUEST)]
    target: String,
    #[command(flatten)]
    agent: Agent,
    /// Also show frames that are not for the metadata service.
    #[arg(long)]
    all: bool,
    /// Also write the headers of frames to a new pcapng file.
    ///
    /// It gets mode 0600, and the verdict of each frame as a comment. It must not exist.
    #[arg(long, value_name = "FILE.pcapng")]
    write: Option<PathBuf>,
    /// Write the first 256 bytes of each frame, including payload with tokens and passwords.
    #[arg(long, requires = "write")]
    payload: bool,
    /// End after this number of frames.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// End after this time: seconds (`5`), or a number with a unit (`5s`, `2m`).
    #[arg(long, value_name = "TIME", value_parser = seconds)]
    seconds: Option<Duration>,
    /// Print one JSON object per line, of the form `trace-lines/1`.
    #[arg(long)]
    json: bool,
}

/// Least and most time of a trace; the most is also the agent's.
const SECONDS: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(3_600);

fn seconds(text: &str) -> Result<Duration, String> {
    time::span_within(text, SECONDS)
}

/// Traces until a limit, a signal or the end of the agent, and then prints the table of verdicts.
///
/// # Errors
/// No agent runs, the agent refuses, or a file or the output cannot be written.
pub fn run(arguments: &TraceArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let answer = ask(arguments)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(trace(arguments, answer, out))
}

async fn trace(arguments: &TraceArgs, answer: StreamedResponse, out: &mut dyn Write) -> anyhow::Result<()> {
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let rest = UnixStream::from_std(answer.stream)?.take(ANSWER_MOST);
    let mut answer = BufReader::new(Cursor::new(answer.begun).chain(rest)).lines();
    let mut seen = TraceOutput::new(arguments)?;
    let end = async {
        match arguments.seconds {
            Some(seconds) => tokio::time::sleep(seconds).await,
            None => std::future::pending().await,
        }
    };
    tokio::pin!(end);
    let ended = loop {
        let line = tokio::select! {
            biased;
            _ = int.recv() => break None,
            _ = term.recv() => break None,
            () = &mut end => break None,
            line = tokio::time::timeout(TIMEOUT, answer.next_line()) => line,
        };
        let Ok(line) = line else { break Some("the agent is silent".to_owned()) };
        let Some(line) = line.context("reading the trace")? else { break Some("the agent has ended".into()) };
        match seen.line(&line, out)? {
            LineOutcome::On => {}
            LineOutcome::Enough => break None,
            LineOutcome::Ended(reason) => break Some(reason),
        }
    };
    // The agent ends the trace when this connection closes.
    drop(answer);
    seen.end(ended.as_deref(), out)?;
    match ended {
        None => Ok(()),
        Some(reason) => bail!("the trace has ended: {reason}"),
    }
}

/// Starts a trace. Returns the stream of its lines.
fn ask(arguments: &TraceArgs) -> anyhow::Result<StreamedResponse> {
    let TraceArgs { agent, target, all, payload, .. } = arguments;
    let query = form_urlencoded::Serializer::new(String::new())
        .append_pair("target", target)
        .append_pair("passing", &all.to_string())
        .append_pair("payload", &payload.to_string())
        .finish();
    let path = format!("/v1/trace?{query}");
    let question = StatusRequest { method: "GET", path: &path, fields: &[], body: &[], timeout: TIMEOUT };
    let answer = open(&agent.run()?, &question)?;
    let status = answer.status;
    if status == 200 {
        answer.stream.set_nonblocking(true)?;
        return Ok(answer);
    }
    let text = answer.rest(REFUSAL_MOST)?;
    Err(ClientError::Refused { status, text: String::from_utf8_lossy(&text).trim().into() }.into())
}

/// What to do after a line.
enum LineOutcome {
    On,
    Enough,
    Ended(String),
}

/// The frames so far, and their file.
struct TraceOutput {
    tally: TraceCounts,
    json: bool,
    left: Option<u64>,
    file: Option<File>,
    capture: Option<Capture>,
}

impl TraceOutput {
    fn new(arguments: &TraceArgs) -> anyhow::Result<Self> {
        let create = |path: &PathBuf| {
            let file = Capture::create(path).with_context(|| format!("cannot make {}", path.display()));
            warn(path, arguments.payload);
            file
        };
        let file = arguments.write.as_ref().map(create).transpose()?;
        let (json, left) = (arguments.json, arguments.count);
        Ok(Self { tally: TraceCounts::default(), json, left, file, capture: None })
    }

    fn line(&mut self, line: &str, out: &mut dyn Write) -> anyhow::Result<LineOutcome> {
        // An empty line shows that the agent still runs. Without frames nothing is written that would show that the
        // reader has gone.
        if line.is_empty() && output::has_no_reader() {
            return Ok(LineOutcome::Enough);
        }
        // A newer agent may send lines of an unknown kind.
        let Ok(line) = serde_json::from_str(line) else { return Ok(LineOutcome::On) };
        match line {
            TraceLine::Begin { schema, .. } if schema != SCHEMA => {
                bail!(
                    "the agent writes {schema}, but this program reads {SCHEMA}; use the agent's version of it"
                )
            }
            TraceLine::Begin { who, unseen, problem, monotonic_ns, unix_ns, .. } => {
                self.tally.begin(monotonic_ns);
                if self.json {
                    let (problem, unseen) = (problem.as_deref(), unseen.as_deref());
                    json(&JsonLine::Begin { schema: LINES_SCHEMA, who: &who, problem, unseen }, out)?;
                } else {
                    writeln!(out, "tracing {}; Ctrl-C ends", Printable(&who))?;
                    if let Some(problem) = problem {
                        writeln!(out, "problem: {}", Printable(problem))?;
                    }
                    if let Some(unseen) = unseen {
                        writeln!(out, "note: {}", Printable(unseen))?;
                    }
                }
                if let Some(file) = self.file.take() {
                    self.capture = Some(Capture::begin(file, &who, monotonic_ns, unix_ns)?);
                }
            }
            TraceLine::Lost { frames } => {
                self.tally.lose(frames);
                if self.json {
                    json(&JsonLine::Lost { frames }, out)?;
                } else {
                    writeln!(
                        out,
                        "--- lost {}, because more arrived than the agent could read",
                        counted(frames, "frame")
                    )?;
                }
                if let Some(capture) = &mut self.capture {
                    capture.lose(frames);
                }
            }
            TraceLine::Frame(frame) => {
                self.tally.count(&frame);
                if self.json {
                    self.tally.print_json(&frame, out)?
                } else {
                    self.tally.print(&frame, out)?
                }
                if let Some(capture) = &mut self.capture {
                    capture.frame(&frame)?;
                }
                if let Some(left) = &mut self.left {
                    *left = left.saturating_sub(1);
                    if *left == 0 {
                        return Ok(LineOutcome::Enough);
                    }
                }
            }
            TraceLine::End { reason } => return Ok(LineOutcome::Ended(reason)),
        }
        out.flush()?;
        Ok(LineOutcome::On)
    }

    fn end(self, reason: Option<&str>, out: &mut dyn Write) -> io::Result<()> {
        if let Some(capture) = self.capture {
            capture.end()?;
        }
        if self.json {
            self.tally.end_json(reason, out)?
        } else {
            self.tally.summary(out)?
        }
        out.flush()
    }
}

fn warn(path: &Path, payload: bool) {
    let what = if payload {
        "will contain payload with tokens, passwords and user-data of the guest; delete it after use"
    } else {
        "will contain headers only (with --payload also payload, including secrets)"
    };
    output::report(format_args!("{} {what}", path.display()));
}

// Prints a trace: one line per frame, and a table at the end.

/// The name and version of the lines of `--json`. The version increases when a member is removed or changes its
/// meaning.
const LINES_SCHEMA: &str = "trace-lines/1";

/// A line of `--json`. A reader ignores lines of a kind it does not know.
#[derive(Debug, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum JsonLine<'a> {
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
struct JsonVerdict<'a> {
    to_guest: bool,
    verdict: &'a str,
    frames: u64,
    bytes: u64,
}

fn json(line: &JsonLine<'_>, out: &mut dyn Write) -> io::Result<()> {
    serde_json::to_writer(&mut *out, line)?;
    writeln!(out)
}

/// Describes a verdict in words.
fn verdict(name: &str) -> String {
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
struct TraceCounts {
    began_ns: u64,
    verdicts: BTreeMap<(bool, String), (u64, u64)>,
    lost: u64,
}

impl TraceCounts {
    fn begin(&mut self, monotonic_ns: u64) {
        self.began_ns = monotonic_ns;
    }

    fn lose(&mut self, frames: u64) {
        self.lost = self.lost.saturating_add(frames);
    }

    fn count(&mut self, frame: &TracedFrame) {
        let key = (frame.to_guest, frame.verdict.clone());
        let (frames, length) = self.verdicts.entry(key).or_default();
        *frames += 1;
        *length += u64::from(frame.length);
    }

    /// Writes the line of a frame.
    fn print(&self, frame: &TracedFrame, out: &mut dyn Write) -> io::Result<()> {
        let micros = frame.time_ns.saturating_sub(self.began_ns) / 1_000;
        let (seconds, micros) = (micros / 1_000_000, micros % 1_000_000);
        let way = way(frame.to_guest);
        let captured = parse_hex(&frame.bytes).unwrap_or_default();
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
            describe_frame(&captured)
        );
        writeln!(out, "{}", Printable(line))
    }

    fn print_json(&self, frame: &TracedFrame, out: &mut dyn Write) -> io::Result<()> {
        let line = JsonLine::Frame {
            seconds: Duration::from_nanos(frame.time_ns.saturating_sub(self.began_ns)).as_secs_f64(),
            to_guest: frame.to_guest,
            verdict: &frame.verdict,
            words: verdict(&frame.verdict),
            bytes: frame.length,
            port: frame.port.as_deref(),
            mac: &frame.mac,
            summary: describe_frame(&parse_hex(&frame.bytes).unwrap_or_default()),
            message: frame.message.as_deref(),
        };
        json(&line, out)
    }

    /// Writes the last line of JSON.
    fn end_json(&self, reason: Option<&str>, out: &mut dyn Write) -> io::Result<()> {
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
    fn summary(&self, out: &mut dyn Write) -> io::Result<()> {
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

// Writes a trace to a pcapng file (draft-ietf-opsawg-pcapng) that only its owner can read.

/// `if_tsresol`: timestamps are nanoseconds.
const NANOSECONDS: u8 = 9;
/// Values of `epb_flags`: the direction, as seen from the node.
const INBOUND: u32 = 1;
const OUTBOUND: u32 = 2;
const MODE: u32 = 0o600;

/// An open pcapng file.
struct Capture {
    writer: PcapNgWriter<BufWriter<File>>,
    /// The time of day minus the kernel's monotonic time, in nanoseconds.
    unix_offset: i128,
    /// Frames lost since the last written frame.
    lost: u64,
}

impl Capture {
    /// Creates the file. Fails if it exists.
    fn create(path: &Path) -> io::Result<File> {
        OpenOptions::new().write(true).create_new(true).mode(MODE).open(path)
    }

    /// Writes the file's head. `monotonic_ns` and `unix_ns` are the same moment.
    fn begin(file: File, who: &str, monotonic_ns: u64, unix_ns: u64) -> io::Result<Self> {
        let mut writer = PcapNgWriter::new(BufWriter::new(file)).map_err(io_error)?;
        let options = vec![
            InterfaceDescriptionOption::IfName(Cow::Borrowed(who)),
            InterfaceDescriptionOption::IfTsResol(NANOSECONDS),
        ];
        let snaplen = u32::try_from(metadata_common::trace::BYTES).unwrap_or_default();
        let interface = InterfaceDescriptionBlock { linktype: DataLink::ETHERNET, snaplen, options };
        writer.write_pcapng_block(interface.into_owned()).map_err(io_error)?;
        Ok(Self { writer, unix_offset: i128::from(unix_ns) - i128::from(monotonic_ns), lost: 0 })
    }

    fn lose(&mut self, frames: u64) {
        self.lost = self.lost.saturating_add(frames);
    }

    fn frame(&mut self, frame: &TracedFrame) -> io::Result<()> {
        let data = parse_hex(&frame.bytes).unwrap_or_default();
        let unix_ns = u64::try_from(i128::from(frame.time_ns) + self.unix_offset).unwrap_or_default();
        let comment = format!("{} ({})", frame.verdict, verdict(&frame.verdict));
        let mut options = vec![
            EnhancedPacketOption::Comment(comment.into()),
            EnhancedPacketOption::Flags(if frame.to_guest { OUTBOUND } else { INBOUND }),
        ];
        let lost = std::mem::take(&mut self.lost);
        if lost > 0 {
            options.push(EnhancedPacketOption::DropCount(lost));
        }
        let packet = EnhancedPacketBlock {
            interface_id: 0,
            timestamp: Duration::from_nanos(unix_ns),
            original_len: frame.length,
            data: data.into(),
            options,
        };
        self.writer.write_pcapng_block(packet).map_err(io_error).map(drop)
    }

    fn end(self) -> io::Result<()> {
        self.writer.into_inner().flush()
    }
}

fn io_error(error: PcapError) -> io::Error {
    match error {
        PcapError::IoError(error) => error,
        other => io::Error::other(other),
    }
}

#[cfg(test)]
mod tests {
    use metadata_control::trace::TracedFrame;
    use pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketOption;
    use pcap_file::pcapng::{Block, PcapNgReader};
    use std::os::unix::fs::PermissionsExt as _;

    use super::{Capture, JsonLine, LINES_SCHEMA, TraceCounts, json, verdict};

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
        let begin =
            JsonLine::Begin { schema: LINES_SCHEMA, who: "web", problem: None, unseen: Some("answers") };
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

    #[test]
    fn a_private_capture_reads_back_with_its_verdicts_and_losses() {
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join("trace.pcapng");
        let file = Capture::create(&path).expect("a file");
        assert_eq!(file.metadata().expect("it is there").permissions().mode() & 0o777, 0o600);
        Capture::create(&path).expect_err("nothing is overwritten");
        let mut capture = Capture::begin(file, "tap0", 1_000, 5_000_001_000).expect("begun");
        let frame = TracedFrame {
            time_ns: 3_000,
            verdict: "drop_vlan".into(),
            length: 99,
            bytes: "00ff10".into(),
            ..TracedFrame::default()
        };
        capture.frame(&frame).expect("written");
        capture.lose(7);
        capture.frame(&TracedFrame { to_guest: true, ..frame }).expect("written");
        capture.end().expect("ended");

        let mut reader = PcapNgReader::new(std::fs::File::open(&path).expect("a file")).expect("pcapng");
        let mut packets = Vec::new();
        while let Some(block) = reader.next_block() {
            if let Block::EnhancedPacket(packet) = block.expect("a block") {
                packets.push(packet.into_owned());
            }
        }
        let [first, second] = &packets[..] else { panic!("{packets:?}") };
        assert_eq!((first.timestamp.as_nanos(), first.original_len), (5_000_003_000, 99));
        assert_eq!(first.data[..], [0, 0xff, 0x10]);
        let comment = EnhancedPacketOption::Comment("drop_vlan (DROPPED: vlan)".into());
        assert_eq!(first.options, [comment.clone(), EnhancedPacketOption::Flags(1)]);
        assert_eq!(
            second.options,
            [comment, EnhancedPacketOption::Flags(2), EnhancedPacketOption::DropCount(7)]
        );
    }
}
