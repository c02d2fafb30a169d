//! The machine and the source of a storm, for readers of its results.

use super::model::Environment;
use anyhow::Result;
use std::process::Command;
use support::netns::run;

/// Describes this machine and this source before the storm.
pub(super) fn look(seed: u64) -> Result<Environment> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':'));
        line.map(|value| value.trim().to_owned())
    };
    let memory = field(&read("/proc/meminfo"), "MemTotal");
    let memory = memory.and_then(|text| text.split(' ').next()?.parse::<u64>().ok()).unwrap_or(0);
    let load = read("/proc/loadavg").split(' ').next().unwrap_or_default().to_owned();
    Ok(Environment {
        kernel: format!("Linux {}", read("/proc/sys/kernel/osrelease").trim()),
        processor: field(&read("/proc/cpuinfo"), "model name").unwrap_or_else(|| "unknown".into()),
        cores: std::thread::available_parallelism()?.get(),
        memory_bytes: memory << 10,
        commit: commit().unwrap_or_else(|| "unknown".into()),
        started: run(Command::new("date").args(["-u", "+%FT%TZ"]))?.trim().to_owned(),
        seed,
        notes: vec![format!("load average at the start: {load}")],
        ..Environment::default()
    })
}

fn commit() -> Option<String> {
    let git = |words: &[&str]| run(Command::new("git").arg("-C").arg(shell::top()).args(words)).ok();
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?.trim().to_owned();
    let changed = !git(&["status", "--porcelain", "--untracked-files=no"])?.trim().is_empty();
    Some(if changed { format!("{commit}-dirty") } else { commit })
}
