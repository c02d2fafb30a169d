//! `xdp-imds trace`: prints each frame to and from one guest, with its verdict.
//!
//! The agent owns the eBPF maps, so the verb asks the agent over a socket in its run directory (`wire`). The verb
//! prints addresses, ports, flags and the first line of an HTTP message (`sketch`, `message`). It never prints header
//! fields or bodies, because they hold tokens and passwords. `--write` writes only headers, or with
//! `--payload` all captured bytes.

mod capture;
mod print;

use std::fs::File;
use std::io::{self, Cursor, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::net::UnixStream;
use tokio::signal::unix::{SignalKind, signal};

use capture::Capture;
use metadata_common::printable::Printable;
use metadata_common::time;
use metadata_control::status::{ClientError, StatusRequest, StreamedResponse, open};
use metadata_control::trace::wire::{SCHEMA, TraceLine};
use print::{JsonLine, TraceCounts, json};

use super::which::{Agent, GUEST};
use crate::output;

/// Maximum time without data from the agent. The agent sends an empty line each second.
const PATIENCE: Duration = Duration::from_secs(10);
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
    /// Show also frames that are not for the metadata service.
    #[arg(long)]
    all: bool,
    /// Write the headers of frames also to a new pcapng file.
    ///
    /// It gets mode 0600, and the verdict of each frame as a comment. It must not exist.
    #[arg(long, value_name = "FILE.pcapng")]
    write: Option<PathBuf>,
    /// Write the first 256 bytes of each frame, including payload with tokens and passwords.
    #[arg(long, requires = "write")]
    payload: bool,
    /// End after this number of frames.
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// End after this time: seconds (`5`), or a number with a unit (`5s`, `2m`).
    #[arg(long, value_name = "TIME", value_parser = seconds)]
    seconds: Option<Duration>,
    /// Print one JSON object per line, of the form `trace-lines/1`.
    #[arg(long)]
    json: bool,
}

/// Longest time of a trace, as of the agent.
const LONGEST: Duration = Duration::from_secs(3_600);

fn seconds(text: &str) -> Result<Duration, String> {
    time::span_within(text, Duration::ZERO..=LONGEST)
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
            line = tokio::time::timeout(PATIENCE, answer.next_line()) => line,
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
    let question = StatusRequest { method: "GET", path: &path, fields: &[], body: &[], patience: PATIENCE };
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
            let file = Capture::create(path).with_context(|| format!("making {}", path.display()));
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
                    json(&JsonLine::Begin { schema: print::SCHEMA, who: &who, problem, unseen }, out)?;
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
                        "--- {frames} frames were lost, because they arrived faster than the agent could read them"
                    )?;
                }
                self.capture.iter_mut().for_each(|capture| capture.lose(frames));
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
