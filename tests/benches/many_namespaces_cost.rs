//! The cost of many namespaces: `cargo bench -p xdp-imds-tests --bench many_namespaces_cost [-- NAMESPACES] [-- tcx]`.
//!
//! Needs root, and the agent built with `--release`. Measures the kernel's memory, and the time until all guests have
//! their first answer after a first start, in a takeover, and after `kill -9` and a restart. Asserts nothing.

use anyhow::Result;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use support::agent::Agent;
use support::privileged;
use support::scene::{ManyNamespaces, PATH};
use support::tap_client::crowd;

const NAMESPACES: u16 = 250;
const ROUNDS: usize = 5;
const PATIENCE: Duration = Duration::from_secs(120);
/// How long a guest waits for an answer on one connection: less than a retransmission timeout.
const ATTEMPT: Duration = Duration::from_millis(100);
/// Pause between two requests of a guest.
const PAUSE: Duration = Duration::from_millis(100);
/// Pause before each measurement of memory, because the kernel frees released memory late.
const SETTLED: Duration = Duration::from_secs(3);

fn main() {
    if privileged::or_skip() {
        measure().expect("a measurement");
    }
}

fn measure() -> Result<()> {
    let count = std::env::args().find_map(|word| word.parse().ok()).unwrap_or(NAMESPACES);
    let steer = if std::env::args().any(|word| word == "tcx") { "tcx" } else { "auto" };
    let words = ["--steer", steer];
    let alone = memory_of_an_agent(1, &words)?;
    println!(
        "{count} namespaces with a VM each, steer: {steer}; an agent with one namespace takes {alone} KiB of kernel memory"
    );
    for round in 1..=ROUNDS {
        let node = ManyNamespaces::new(count, &words)?;
        let before = kernel_kib()?;
        let start = Instant::now();
        let agent = node.agent()?;
        let serving = start.elapsed();
        let took = node.all_ask(PATIENCE)?;
        println!(
            "round {round}: serving after {serving:.2?}, all answered after {:.2?}, kernel memory {} KiB",
            serving + took[took.len() - 1],
            kernel_kib()?.saturating_sub(before)
        );
        let next = take_over(&node, agent)?;
        next.kill()?;
        let took = std::thread::scope(|scope| -> Result<_> {
            let asking = scope.spawn(|| node.all_ask_again(PATIENCE, ATTEMPT));
            let agent = node.agent()?;
            let took = asking.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            drop(agent);
            Ok(took)
        })?;
        println!(
            "         after kill -9 and a start: first answer after {:.2?}, p50 {:.2?}, all {:.2?}",
            took[0],
            took[took.len() / 2],
            took[took.len() - 1]
        );
    }
    Ok(())
}

/// Lets another agent take over while all guests send requests, each from a new port.
fn take_over<'a>(node: &'a ManyNamespaces, agent: Agent<'a>) -> Result<Agent<'a>> {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| crowd(node.guests.clone(), &[PATH], PAUSE, &over, PATIENCE));
        let start = Instant::now();
        let next = node.agent_with(&["--takeover"]).and_then(|next| {
            let ready = start.elapsed();
            agent.ended(PATIENCE)?;
            Ok((ready, next))
        });
        over.store(true, Ordering::Relaxed);
        let tallies = asking.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let (ready, next) = next?;
        let failed = tallies.iter().filter(|tally| tally.rounds.is_err()).count();
        let answers: usize = tallies.iter().filter_map(|tally| tally.rounds.as_ref().ok()).sum();
        let resent: usize = tallies.iter().map(|tally| tally.resent).sum();
        println!(
            "         another agent took over and served after {ready:.2?}, and the first ended after {:.2?}: \
             {answers} answers meanwhile, {failed} guests failed, {resent} segments sent again",
            start.elapsed()
        );
        Ok(next)
    })
}

/// The kernel memory of an agent with `count` namespaces, in KiB.
fn memory_of_an_agent(count: u16, words: &[&str]) -> Result<u64> {
    let node = ManyNamespaces::new(count, words)?;
    let before = kernel_kib()?;
    let _agent = node.agent()?;
    node.all_ask(PATIENCE)?;
    Ok(kernel_kib()?.saturating_sub(before))
}

/// The kernel's own memory in KiB: slabs that it cannot reclaim, `vmalloc` areas and per-CPU memory.
///
/// Reclaimable slabs are caches of files and directories that the agent has read.
fn kernel_kib() -> Result<u64> {
    std::thread::sleep(SETTLED);
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let of = |line: &str| {
        let mut words = line.split_whitespace();
        let name = words.next()?;
        ["SUnreclaim:", "VmallocUsed:", "Percpu:"]
            .contains(&name)
            .then(|| words.next()?.parse::<u64>().ok())
            .flatten()
    };
    Ok(text.lines().filter_map(of).sum::<u64>())
}
