//! `cargo xtask ci`: every check that a change must pass. Checks that fail quickly come first.
//!
//! A check is left to `--whole` if it repeats on another kernel, processor or directory what this run checks here, or
//! runs together what tests run one by one. A step whose inputs are unchanged since it passed is skipped. The summary
//! names both.

mod stamps;

use std::cell::Cell;
use std::collections::HashSet;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use clap::builder::PossibleValuesParser;
use shell::architecture::Architecture;
use shell::variables::BUILT;
use stamps::Stamps;

/// Every run of all steps does the same checks, so that everybody runs them.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Print the names of the steps, and run nothing
    #[arg(long, conflicts_with_all = ["steps", "whole"])]
    list: bool,
    /// Run everything, as before a release: also what a change rarely breaks, and what is unchanged since it passed
    #[arg(long, conflicts_with = "steps")]
    whole: bool,
    /// Run only these steps, whole and in their usual order; by default all
    #[arg(value_name = "STEP", value_parser = PossibleValuesParser::new(names()))]
    steps: Vec<String>,
}

/// The eBPF crate, which is outside the workspace.
const EBPF: &str = "metadata-ebpf/Cargo.toml";

/// The profile for builds that are only tested: it does not optimise, which would take a quarter of an hour.
const QUICK: &str = "quick";

/// One gibibyte in bytes.
const GIB: u64 = 1 << 30;
/// What the target directory holds after a run of all steps that found it empty.
const WHOLE_RUN: u64 = 25 * GIB;
/// The least space with which a step begins, also where the target directory holds a whole run already: what
/// changed is built beside what was there.
const LEAST_FREE: u64 = 4 * GIB;

/// A check of its own, with a name to ask for it.
struct Step {
    name: &'static str,
    /// What it checks, for `--list`.
    about: &'static str,
    run: fn(&CiRun) -> Result<StepOutcome>,
    /// The paths that it depends on, as Git understands them; without any it runs each time.
    inputs: &'static [&'static [&'static str]],
    /// What only `--whole` and a run of the named step do.
    left: Left,
}

/// What of a step is left to `--whole`.
enum Left {
    Nothing,
    /// Some of it; the words say what.
    Part(&'static str),
    /// All of it; the words say why.
    All(&'static str),
}

/// How a step ended that found no fault.
#[derive(Debug)]
pub(crate) enum StepOutcome {
    Passed,
    /// This machine lacks what the step needs; the words say what.
    NotChecked(String),
    /// It has passed before, and nothing that it depends on has changed.
    Unchanged,
}

/// What a step knows of the run.
struct CiRun {
    /// Nothing is left out.
    is_whole: bool,
    /// The step `build` has built the programs of all verbs.
    has_built: Cell<bool>,
}

/// Everything that Git knows.
const EVERYTHING: &[&str] = &["."];
/// The agent, and what it includes.
const AGENT: &[&str] = &["metadata-common", "metadata-ebpf/prebuilt", "metadata-user"];
/// All Rust code, and the files that it includes.
const RUST: &[&str] =
    &["deploy", "docs/src", "metadata-common", "metadata-ebpf", "metadata-user", "tests", "xtask"];
/// The programs that simulate guests and nodes.
const LAB: &[&str] = &["tests", "xtask/lab"];
/// What packages, images and manifests are made of beside the agent.
const PACKAGING: &[&str] =
    &["*.md", "LICENSE-*", "deploy", "docs/src", "tests/schemas", "tests/testbed", "xtask/make"];

const STEPS: &[Step] = &[
    step("commits", "messages of new commits say what, why and how tested", |_| messages(), &[]),
    step("format", "rustfmt leaves every file as it is", format, &[]),
    step("lints", "clippy has no warning, with every set of features", lints, &[RUST]),
    step("docs", "rustdoc has no warning", docs, &[RUST]),
    step("licences", "bans, licences and sources of crates", deny, &[&["*Cargo.toml", "deny.toml"]]),
    step("advisories", "known vulnerabilities of crates, where there is network", advisories, &[]),
    step("build", "all tests, and the programs of all verbs, compile", build, &[]),
    step(
        "object",
        "the committed eBPF objects match their source",
        object,
        &[&["metadata-common", "metadata-ebpf", "xtask/make"]],
    ),
    step("tests", "every test, as root, with none skipped", tests, &[EVERYTHING]),
    step("book", "README and book match the code", book, &[EVERYTHING]),
    step("manifests", "manifests and chart are valid and equal", manifests, &[AGENT, PACKAGING]),
    step("image", "the image serves a guest, and is reproducible", image, &[AGENT, PACKAGING, LAB])
        .left(Left::Part("the same image from another directory")),
    step("package", "the Debian package installs, serves and leaves nothing", package, &[AGENT, PACKAGING]),
    step("fuzz", "the fuzz targets build", fuzz_targets, &[RUST]),
    step("miri", "unsafe code under Miri, where there is one", miri, &[AGENT]),
    step("soak", "a minute of churn, restarts and hostile guests", soak, &[AGENT, LAB]),
    step("tenants", "a modest tenant is served among hostile ones", tenants, &[AGENT, LAB, PACKAGING])
        .left(Left::All("tests have each attack alone")),
    step(
        "kernels",
        "an old and a new kernel, and one for arm64",
        kernels,
        &[AGENT, &["tests", "xtask/kernels"]],
    )
    .left(Left::Part("the newest kernel, and arm64; this machine's kernel has every test")),
];

const fn step(
    name: &'static str,
    about: &'static str,
    run: fn(&CiRun) -> Result<StepOutcome>,
    inputs: &'static [&'static [&'static str]],
) -> Step {
    Step { name, about, run, inputs, left: Left::Nothing }
}

impl Step {
    const fn left(self, left: Left) -> Self {
        Self { left, ..self }
    }

    /// Runs the step, and returns its line of the summary.
    fn run(&self, run: &CiRun, stamps: &Stamps) -> Result<String> {
        let name = self.name;
        let left = match self.left {
            _ if run.is_whole => String::new(),
            Left::Nothing => String::new(),
            Left::Part(what) => format!("; left to --whole: {what}"),
            Left::All(why) => return Ok(format!("left             {name}: left to --whole; {why}")),
        };
        eprintln!("\n== {name}");
        let started = Instant::now();
        let outcome = stamps.run(name, self.inputs, run.is_whole, || (self.run)(run))?;
        let seconds = started.elapsed().as_secs();
        Ok(match outcome {
            StepOutcome::Passed => format!("ok      {seconds:>5} s  {name}{left}"),
            StepOutcome::NotChecked(why) => format!("NOT CHECKED      {name}: {why}"),
            StepOutcome::Unchanged => format!("skipped          {name}: unchanged since it passed{left}"),
        })
    }
}

fn names() -> Vec<&'static str> {
    STEPS.iter().map(|step| step.name).collect()
}

/// Runs the steps, even after a failure, so that one run shows every failure.
pub(crate) fn run(args: &Args) -> Result<()> {
    if args.list {
        print!("{}", list());
        return Ok(());
    }
    let target = shell::target();
    let free = free(&target)?;
    let is_named = !args.steps.is_empty();
    // Only a run of all steps may have to build everything.
    let held = if is_named { WHOLE_RUN } else { held(&target, WHOLE_RUN) };
    eprintln!("{}", room(&target, free, held)?);
    let run = CiRun { is_whole: args.whole || is_named, has_built: Cell::new(false) };
    let stamps = Stamps::here();
    let mut lines = Vec::new();
    let mut failed = Vec::new();
    for step in STEPS.iter().filter(|step| !is_named || args.steps.iter().any(|name| name == step.name)) {
        let started = Instant::now();
        match step.run(&run, &stamps) {
            Ok(line) => lines.push(line),
            Err(error) => {
                let seconds = started.elapsed().as_secs();
                lines.push(format!("FAILED  {seconds:>5} s  {}: {error:#}", step.name));
                failed.push(step.name);
            }
        }
    }
    eprintln!("\n{}", lines.join("\n"));
    if failed.is_empty() {
        return Ok(());
    }
    bail!("failed; run them again with `cargo xtask ci {}`", failed.join(" "))
}

/// Returns a line for each step.
fn list() -> String {
    let width = STEPS.iter().map(|step| step.name.len()).max().unwrap_or_default();
    let line = |step: &Step| {
        let left = match step.left {
            Left::Nothing => String::new(),
            Left::Part(what) => format!(" (--whole: {what})"),
            Left::All(_) => " (--whole)".to_owned(),
        };
        format!("{:width$}  {}{left}\n", step.name, step.about)
    };
    STEPS.iter().map(line).collect()
}

/// Says how much space is free for the target directory. Refuses to begin where a run would end on a full disk, hours
/// later and with errors of a linker.
fn room(target: &Path, free: u64, held: u64) -> Result<String> {
    let needed = WHOLE_RUN.saturating_sub(held).max(LEAST_FREE);
    let says = format!("{} GiB are free for {}", free / GIB, target.display());
    ensure!(
        free >= needed,
        "{says}, and this run takes about {} GiB; free some, or name another directory by CARGO_TARGET_DIR",
        needed.div_ceil(GIB)
    );
    Ok(says)
}

/// Returns the free space of the file system that holds a directory, or will hold it, in bytes.
fn free(dir: &Path) -> Result<u64> {
    let there = dir.ancestors().find(|dir| dir.is_dir()).unwrap_or(Path::new("/"));
    shell::free(there).with_context(|| format!("cannot ask how much is free at {}", there.display()))
}

/// Returns how many bytes a directory's files take; it counts no further than `enough`. A file with several names
/// counts once, as Cargo links what it builds.
fn held(dir: &Path, enough: u64) -> u64 {
    let mut dirs = vec![dir.to_owned()];
    let mut seen = HashSet::new();
    let mut sum = 0;
    while let Some(dir) = dirs.pop() {
        for entry in dir.read_dir().into_iter().flatten().flatten() {
            let Ok(data) = entry.metadata() else { continue };
            if data.is_dir() {
                dirs.push(entry.path());
            } else if data.nlink() == 1 || seen.insert(data.ino()) {
                sum += data.blocks() * 512;
            }
        }
        if sum >= enough {
            return enough;
        }
    }
    sum
}

fn format(_: &CiRun) -> Result<StepOutcome> {
    shell::run(&mut shell::cargo(["fmt", "--all", "--check"]))?;
    passed(shell::run(&mut shell::cargo(["fmt", "--manifest-path", EBPF, "--check"])))
}

fn passed(checked: Result<()>) -> Result<StepOutcome> {
    checked.map(|()| StepOutcome::Passed)
}

fn lints(_: &CiRun) -> Result<StepOutcome> {
    let strict = ["--locked", "--", "--deny", "warnings"];
    shell::run(shell::cargo(["clippy", "--workspace", "--all-targets"]).args(strict))?;
    // The agent without the features that only clusters need, and the tests that need neither root nor a cluster.
    let lean = ["clippy", "--package", "metadata-user", "--package", "xdp-imds-tests"];
    shell::run(shell::cargo(lean).args(["--all-targets", "--no-default-features"]).args(strict))?;
    passed(shell::run(shell::cargo(["clippy", "--manifest-path", EBPF]).args(strict)))
}

fn docs(_: &CiRun) -> Result<StepOutcome> {
    let mut doc = shell::cargo(["doc", "--workspace", "--no-deps", "--document-private-items", "--locked"]);
    passed(shell::run(doc.env("RUSTDOCFLAGS", "--deny warnings")))
}

fn deny(_: &CiRun) -> Result<StepOutcome> {
    if shell::which("cargo-deny").is_none() {
        bail!("cargo-deny is missing; run `cargo install --locked cargo-deny`");
    }
    let words = ["deny", "--locked", "check", "--hide-inclusion-graph", "bans", "licenses", "sources"];
    passed(shell::run(&mut shell::cargo(words)))
}

/// Checks for known vulnerabilities. The advisory database comes over the network.
fn advisories(_: &CiRun) -> Result<StepOutcome> {
    let fetched =
        shell::cargo(["deny", "--locked", "fetch", "db"]).stderr(std::process::Stdio::null()).status();
    if !fetched.is_ok_and(|status| status.success()) {
        let why = "the advisory database could not be fetched; run `cargo deny check advisories` where there is network";
        return Ok(StepOutcome::NotChecked(why.into()));
    }
    passed(shell::run(&mut shell::cargo(["deny", "--locked", "check", "--disable-fetch", "advisories"])))
}

/// The programs that have the other verbs.
const PROGRAMS: [&str; 5] =
    ["xdp-imds-demo", "xdp-imds-kernels", "xdp-imds-lab", "xdp-imds-load", "xdp-imds-make"];

/// Builds all tests and the programs of all verbs in one call, with one set of features and in one profile, so that
/// nothing is built twice: one by one, each program would have features of its own.
fn build(run: &CiRun) -> Result<StepOutcome> {
    let bins = PROGRAMS.iter().flat_map(|name| ["--bin", name]);
    let mut cargo = shell::cargo(["build", "--locked", "--profile", "test", "--workspace", "--tests"]);
    shell::run(cargo.args(bins))?;
    run.has_built.set(true);
    Ok(StepOutcome::Passed)
}

fn object(run: &CiRun) -> Result<StepOutcome> {
    run.xtask(&["build-ebpf", "--check"])
}

fn tests(run: &CiRun) -> Result<StepOutcome> {
    run.xtask(&["test", "--require-privileged"])
}

/// Returns the agent that the tests use. After them this builds nothing.
fn agent() -> Result<String> {
    shell::run(&mut shell::tested_agent())?;
    Ok(shell::target().join("debug/xdp-imds").to_string_lossy().into_owned())
}

/// Checks that README and book match the code, and that their links work.
fn book(run: &CiRun) -> Result<StepOutcome> {
    run.xtask(&["book", "--check", "--agent", &agent()?])
}

/// Renders the manifests and validates them against their schemas.
fn manifests(run: &CiRun) -> Result<StepOutcome> {
    run.xtask(&["manifests"])
}

/// Checks that a container of the image serves a guest, and that builds in two directories have the same digest.
fn image(run: &CiRun) -> Result<StepOutcome> {
    let words = ["image", "--try", "--profile", QUICK, "--check"];
    run.xtask(if run.is_whole { &words } else { &words[..4] })
}

/// Makes the package of the image's binary, checks its contents, installs it and purges it.
fn package(run: &CiRun) -> Result<StepOutcome> {
    run.xtask(&["deb", "--static", "--profile", QUICK])
}

/// Checks that the fuzz targets build. The ordinary tests run their assertions on the seeds.
fn fuzz_targets(_: &CiRun) -> Result<StepOutcome> {
    let manifest = ["--manifest-path", "tests/fuzz/Cargo.toml"];
    shell::run(shell::cargo(["fmt"]).args(manifest).arg("--check"))?;
    let mut check = shell::cargo(["check", "--locked"]);
    // The workspace's target directory and its line tables, so that what clippy has checked is not checked again.
    check.env("CARGO_PROFILE_DEV_DEBUG", "line-tables-only").arg("--target-dir").arg(shell::target());
    passed(shell::run(check.args(manifest)))
}

/// Runs unsafe code under Miri, which only nightly toolchains have.
fn miri(run: &CiRun) -> Result<StepOutcome> {
    match super::miri::missing() {
        Some(missing) => Ok(StepOutcome::NotChecked(missing.into())),
        None => run.xtask(&["miri"]),
    }
}

/// Soaks the agent that the tests built for a minute, with churn, restarts and hostile guests.
fn soak(run: &CiRun) -> Result<StepOutcome> {
    run.xtask(&["soak", "--minutes", "1", "--agent", &agent()?])
}

/// The attacks that say in half a minute whether tenants are apart and their input is bounded. The others, and all at
/// once, take longer than CI should: `cargo xtask soak --tenants --minutes 30` before a release.
const ATTACKS: &str =
    "equal-uuid,equal-uuid-slow,proxmox-uuid,yaml-bomb,proxmox-bomb,render-bomb,record-memory,attributes";

/// Serves a modest tenant among hostile ones, with the agent of the image.
fn tenants(run: &CiRun) -> Result<StepOutcome> {
    let here = Architecture::named(std::env::consts::ARCH)?;
    let agent = here.products(&shell::target().join("image-build"), QUICK).join("xdp-imds");
    if !agent.is_file() {
        run.xtask(&["image", "--profile", QUICK])?;
    }
    let agent = agent.to_string_lossy();
    run.xtask(&["soak", "--tenants", "--minutes", "0.5", "--only", ATTACKS, "--agent", &agent])
}

/// Boots an old and a new kernel, and one for arm64, with the agent that the tests built.
fn kernels(run: &CiRun) -> Result<StepOutcome> {
    if !run.is_whole {
        return run.xtask(&["kernels", "--short", "--kernel", "6.1"]);
    }
    run.xtask(&["kernels", "--short", "--kernel", "6.1,newest"])?;
    run.xtask(&["kernels", "--short", "--kernel", "6.12", "--arch", "arm64"])
}

/// The running program, also after a step has built it anew and Cargo has replaced its file.
const SELF: &str = "/proc/self/exe";

impl CiRun {
    /// Runs another verb in a process of its own, as a person would.
    fn xtask(&self, words: &[&str]) -> Result<StepOutcome> {
        let shown = format!("cargo xtask {}", words.join(" "));
        eprintln!("$ {shown}");
        let mut command = Command::new(SELF);
        command.args(words).current_dir(shell::top());
        if self.has_built.get() {
            command.env(BUILT, "1");
        }
        let status = command.status().with_context(|| format!("cannot run {shown}"))?;
        ensure!(status.success(), "{shown}: {status}");
        Ok(StepOutcome::Passed)
    }
}

// The rule of commit messages: what changed in which area, then why and how it was tested.

/// Most columns of a subject, so that `git log --oneline` shows it whole.
const SUBJECT_COLUMNS: usize = 72;
/// The commit after which every message follows the rule.
const SINCE: &str = "48d7a080";
/// Ends a message in the output of git; no message has it.
const END: char = '\0';

/// Checks every commit since the rule. Without its first commit, as in a shallow clone, it checks nothing.
fn messages() -> Result<StepOutcome> {
    let range = format!("{SINCE}..HEAD");
    let mut git = Command::new("git");
    git.args(["log", "--no-merges", "--format=%B%x00", &range]).current_dir(shell::top());
    let output = git.output().context("cannot run git")?;
    if !output.status.success() {
        let why = format!("git log {range}: {}", String::from_utf8_lossy(&output.stderr).trim());
        return Ok(StepOutcome::NotChecked(why));
    }
    let text = String::from_utf8(output.stdout).context("a commit message is not UTF-8")?;
    let messages = text.split(END).map(str::trim).filter(|message| !message.is_empty());
    let faults: Vec<_> = messages.filter_map(fault).collect();
    ensure!(
        faults.is_empty(),
        "{}\nmend them with `git rebase --interactive`; CONTRIBUTING.md has the rule",
        faults.join("\n")
    );
    Ok(StepOutcome::Passed)
}

/// Returns what a message lacks, with its subject.
fn fault(message: &str) -> Option<String> {
    let (subject, body) = message.split_once('\n').unwrap_or((message, ""));
    let area = subject.split_once(": ").map(|(area, _)| area);
    let is_area = |area: &str| {
        !area.is_empty()
            && area.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || ", -_/".contains(c))
    };
    let fault = if !area.is_some_and(is_area) {
        "has no area in small letters, such as `feed: `"
    } else if subject.chars().count() > SUBJECT_COLUMNS {
        "has a subject of more than 72 columns"
    } else if !body.starts_with('\n') || body.trim().is_empty() {
        "has no body that says why, and how it was tested"
    } else {
        return None;
    };
    Some(format!("`{subject}` {fault}"))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::path::Path;
    use std::process::Command;

    use clap::Parser as _;

    use super::{CiRun, GIB, LEAST_FREE, Left, STEPS, WHOLE_RUN, fault, held, list, room, stamps};
    use crate::{Cli, Verb};

    #[test]
    fn each_step_has_a_name_of_one_word_and_a_line_in_the_list() {
        let listed = list();
        for step in STEPS {
            assert!(step.name.chars().all(|c| c.is_ascii_lowercase()), "{}", step.name);
            let lines = listed.lines().filter(|line| line.split(' ').next() == Some(step.name));
            assert_eq!(lines.count(), 1, "{}", step.name);
        }
    }

    #[test]
    fn the_inputs_of_every_step_exist_and_what_is_left_out_is_listed() {
        let listed = list();
        for step in STEPS {
            for path in step.inputs.iter().copied().flatten() {
                assert!(stamps::is_known(path), "{}: {path}", step.name);
            }
            let line = listed.lines().find(|line| line.split(' ').next() == Some(step.name));
            let is_marked = line.is_some_and(|line| line.contains("(--whole"));
            assert_eq!(is_marked, !matches!(step.left, Left::Nothing), "{}", step.name);
        }
    }

    #[test]
    fn steps_are_chosen_by_name_and_an_unknown_one_is_refused() {
        for (line, expected) in [
            ("ci", Some(0)),
            ("ci tests book", Some(2)),
            ("ci --list", Some(0)),
            ("ci nosuch", None),
            ("ci --list tests", None),
            ("ci --whole", Some(0)),
            ("ci --whole tests", None),
            ("ci --whole --list", None),
        ] {
            let parsed = Cli::try_parse_from(["xtask"].into_iter().chain(line.split(' ')));
            let chosen = parsed.ok().map(|cli| match cli.verb {
                Verb::Ci(args) => args.steps.len(),
                _ => panic!("{line} is another verb"),
            });
            assert_eq!(chosen, expected, "{line}");
        }
    }

    /// Set for a copy of this test program that removes its own file, as a build does that replaces it.
    const REMOVED: &str = "XTASK_TEST_REMOVED";

    #[test]
    fn another_verb_runs_after_a_step_has_replaced_this_program() {
        let own = std::env::current_exe().expect("the path of this program");
        // Arguments of the test harness, which both the copy and its child are.
        let arguments = ["--exact", "ci::tests::another_verb_runs_after_a_step_has_replaced_this_program"];
        if std::env::var_os(REMOVED).is_some() {
            if own.is_file() {
                std::fs::remove_file(own).expect("the copy is removed");
                let run = CiRun { is_whole: false, has_built: Cell::new(false) };
                run.xtask(&arguments).expect("the removed program runs");
            }
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let copy = dir.path().join("xtask");
        // Another program copies: a file that this one has open for writing cannot be run by a child that another test
        // starts at the same moment (ETXTBSY).
        let copied = Command::new("cp").arg(own).arg(&copy).status().expect("cp runs");
        assert!(copied.success(), "{copied}");
        let mut command = Command::new(&copy);
        let output = command.args(arguments).env(REMOVED, "1").output().expect("the copy runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        assert!(!copy.exists());
    }

    #[test]
    fn a_run_begins_only_with_room_for_what_the_target_does_not_hold_yet() {
        for (free, held, expected) in [
            (WHOLE_RUN, 0, true),
            (WHOLE_RUN - 1, 0, false),
            (WHOLE_RUN - GIB, GIB, true),
            (LEAST_FREE, WHOLE_RUN, true),
            (LEAST_FREE - 1, WHOLE_RUN, false),
            (LEAST_FREE, 2 * WHOLE_RUN, true),
        ] {
            let said = room(Path::new("/t"), free, held);
            assert_eq!(said.is_ok(), expected, "{free} {held}");
            let text = said.unwrap_or_else(|error| error.to_string());
            assert!(text.starts_with(&format!("{} GiB are free for /t", free / GIB)), "{text}");
        }
    }

    #[test]
    fn hosted_workflows_name_actions_by_commit_and_version() {
        let mut actions = 0;
        for file in shell::top().join(".github/workflows").read_dir().expect("workflows") {
            let path = file.expect("a file").path();
            let text = std::fs::read_to_string(&path).expect("text");
            for line in
                text.lines().filter_map(|line| line.trim().trim_start_matches("- ").strip_prefix("uses: "))
            {
                // A workflow of the same commit.
                if line.starts_with("./") {
                    continue;
                }
                let (name, version) = line.split_once(" # v").unwrap_or((line, ""));
                let commit = name.split_once('@').map_or("", |(_, commit)| commit);
                let is_commit = commit.len() == 40 && commit.chars().all(|c| c.is_ascii_hexdigit());
                assert!(is_commit && !version.is_empty(), "{}: {line}", path.display());
                actions += 1;
            }
        }
        assert!(actions > 10, "{actions}");
    }

    #[test]
    fn files_with_several_names_take_their_room_once() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("one");
        std::fs::write(&file, vec![1; 64 << 10]).expect("written");
        std::fs::create_dir(dir.path().join("deps")).expect("a directory");
        std::fs::hard_link(&file, dir.path().join("deps/two")).expect("linked");
        let sum = held(dir.path(), u64::MAX);
        assert!((64 << 10..128 << 10).contains(&sum), "{sum}");
        assert_eq!(held(dir.path(), 4096), 4096);
        assert_eq!(held(&dir.path().join("absent"), u64::MAX), 0);
    }

    #[test]
    fn a_message_has_an_area_a_short_subject_and_a_reason() {
        let long = format!("feed: {}\n\nBecause.", "x".repeat(67));
        for (message, expected) in [
            ("feed: read tokens again\n\nThey expire. Tested by hand.", None),
            ("docs, deploy: name the unit\n\nIt was missing.", None),
            ("feed: read tokens again", Some("has no body")),
            ("feed: read tokens again\nat once", Some("has no body")),
            ("feed: read tokens again\n\n", Some("has no body")),
            ("Read tokens again\n\nThey expire.", Some("has no area")),
            ("Feed: read tokens again\n\nThey expire.", Some("has no area")),
            (&long, Some("more than 72 columns")),
        ] {
            let found = fault(message);
            assert_eq!(found.is_some(), expected.is_some(), "{message}: {found:?}");
            assert!(found.unwrap_or_default().contains(expected.unwrap_or_default()), "{message}");
        }
    }
}
