//! `cargo xtask traffic`: measures what steering costs guests' other traffic, by program and kind of frame.
//!
//! One guest on a real tap with offloads, in a namespace of its own, sends through a bridge to a neighbour that does
//! not answer. With `--pod`, the path leads out of a pod through one of KubeVirt's bindings (see `way`). The kernel
//! does all of this within the guest's `write(2)`, so the sender's CPU time is that of the whole system. Programs
//! alternate on the same tap, in every round.

mod frames;
mod report;
mod way;

use anyhow::{Context as _, Result, ensure};
use frames::Kind;
use report::{Report, Row};
use shell::tools;
use std::fs;
use std::path::PathBuf;
use support::netns::Namespace;
use support::tap::Tap;
use support::variants::{Variant, Variants};
use way::{Binding, Way};

/// The most rounds. Each takes about a third of a second.
const MAX_ROUNDS: u16 = 2_000;
/// Frames sent without measurement after each change of program.
const WARM_UP: u32 = 200;

/// The number of rounds, the path and the form of the result.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of measurements of each program with each kind of frame
    #[arg(long, default_value_t = 101, value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_ROUNDS)))]
    rounds: u16,
    /// Put the tap into a pod with this binding, and the neighbour behind the node's bridge
    #[arg(long, value_name = "BINDING", num_args = 0..=1, default_missing_value = "bridge")]
    pod: Option<Binding>,
    /// Print the result as JSON on standard output (progress always goes to standard error)
    #[arg(long)]
    json: bool,
    /// Also draw the result as a bar chart
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// Runs the verb.
pub(crate) fn run(args: &Args) -> Result<()> {
    shell::go_on_as_root(&[])?;
    tools::ensure(tools::LAB)?;
    let report = measure(args.rounds, args.pod)?;
    if let Some(file) = &args.svg {
        fs::write(file, report.svg()).with_context(|| format!("cannot write {}", file.display()))?;
    }
    if args.json {
        println!("{:#}", report.json());
    } else {
        print!("{}", report.text());
    }
    Ok(())
}

fn measure(rounds: u16, pod: Option<Binding>) -> Result<Report> {
    let way = Way::lay(pod)?;
    let (ns, tap) = (way.ns(), way.tap());
    let mut variants = Variants::load(ns, tap.name())?;
    let mut samples = vec![Vec::with_capacity(rounds.into()); Kind::ALL.len() * Variant::ALL.len()];
    for round in 0..usize::from(rounds) {
        if round.is_multiple_of(5) {
            eprintln!("round {} of {rounds}", round + 1);
        }
        for turn in 0..Variant::ALL.len() {
            // Each round begins with another program, so that none always follows the same one.
            let at = (turn + round) % Variant::ALL.len();
            let taken = variants.with(Variant::ALL[at], || {
                Kind::ALL.iter().map(|kind| cost(tap, *kind)).collect::<Result<Vec<_>>>()
            });
            let taken = taken.with_context(|| format!("with {}", Variant::ALL[at].name()))?;
            for (kind, nanos) in taken.into_iter().enumerate() {
                samples[kind * Variant::ALL.len() + at].push(nanos);
            }
        }
    }
    let arrived = sink_frames(way.end())?;
    let sent: u64 = Kind::ALL.iter().map(|kind| u64::from(WARM_UP + kind.frames())).sum::<u64>()
        * u64::from(rounds)
        * Variant::ALL.len() as u64;
    ensure!(
        arrived >= sent,
        "only {arrived} of {sent} frames reached the neighbour, so the costs are not valid"
    );
    let cells = Kind::ALL.iter().flat_map(|kind| Variant::ALL.iter().map(move |variant| (*kind, *variant)));
    let rows = cells.zip(samples).map(|((kind, variant), nanos)| Row::new(kind, variant, nanos)).collect();
    Report::new(way.name(), rounds, rows)
}

/// Returns the CPU time of the whole system for one frame of a kind, in nanoseconds.
fn cost(tap: &Tap, kind: Kind) -> Result<f64> {
    let frame = kind.frame();
    send(tap, &frame, WARM_UP)?;
    let before = own_cpu()?;
    send(tap, &frame, kind.frames())?;
    Ok((own_cpu()? - before) as f64 / f64::from(kind.frames()))
}

fn send(tap: &Tap, frame: &[u8], times: u32) -> Result<()> {
    for _ in 0..times {
        ensure!(tap.send(0, frame)?, "the tap refused a frame, although no queue is on its path");
    }
    Ok(())
}

/// Returns the CPU time of this thread in nanoseconds (Linux: Documentation/scheduler/sched-stats.rst).
fn own_cpu() -> Result<u64> {
    // Yielding updates the value, which the tick does only every few milliseconds.
    std::thread::yield_now();
    let shown =
        fs::read_to_string("/proc/thread-self/schedstat").context("cannot read this thread's CPU time")?;
    let first = shown.split_whitespace().next().context("schedstat is empty")?;
    Ok(first.parse()?)
}

/// Returns the number of frames that reached the neighbour. A frame of many segments counts once.
fn sink_frames(ns: &Namespace) -> Result<u64> {
    let shown: serde_json::Value = serde_json::from_str(&ns.ip("-j -s link show dev far0")?)?;
    shown[0]["stats64"]["rx"]["packets"].as_u64().context("`ip -j -s link` shows no received frames")
}
