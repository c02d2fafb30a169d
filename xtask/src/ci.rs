//! `cargo xtask ci`: every check that a change must pass. Checks that fail quickly come first.

use anyhow::{Context as _, Result, bail, ensure};
use clap::builder::PossibleValuesParser;
use shell::architecture::Architecture;
use std::collections::HashSet;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// Every run of all steps does the same checks, so that everybody runs them.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Print the names of the steps, and run nothing
    #[arg(long, conflicts_with = "steps")]
    list: bool,
    /// Run only these steps, in their usual order; by default all
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
    run: fn() -> Result<()>,
}

const STEPS: &[Step] = &[
    Step {
        name: "commits",
        about: "messages of new commits say what, why and how tested",
        run: super::commits::check,
    },
    Step { name: "format", about: "rustfmt leaves every file as it is", run: format },
    Step { name: "lints", about: "clippy has no warning, with every set of features", run: lints },
    Step { name: "docs", about: "rustdoc has no warning", run: docs },
    Step { name: "licences", about: "bans, licences and sources of crates", run: deny },
    Step {
        name: "advisories",
        about: "known vulnerabilities of crates, where there is network",
        run: advisories,
    },
    Step { name: "object", about: "the committed eBPF objects match their source", run: object },
    Step { name: "tests", about: "every test, as root, with none skipped", run: tests },
    Step { name: "book", about: "README and book match the code", run: book },
    Step { name: "manifests", about: "manifests and chart are valid and equal", run: manifests },
    Step { name: "image", about: "the image is reproducible, and serves a guest", run: image },
    Step { name: "package", about: "the Debian package installs, serves and leaves nothing", run: package },
    Step { name: "fuzz", about: "the fuzz targets build", run: fuzz_targets },
    Step { name: "miri", about: "unsafe code under Miri, where there is one", run: miri },
    Step { name: "soak", about: "a minute of churn, restarts and hostile guests", run: soak },
    Step { name: "tenants", about: "a modest tenant is served among hostile ones", run: tenants },
    Step { name: "kernels", about: "an old and a new kernel, and one for arm64", run: kernels },
];

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
    let is_whole = args.steps.is_empty();
    // Only a whole run may have to build everything.
    let held = if is_whole { held(&target, WHOLE_RUN) } else { WHOLE_RUN };
    eprintln!("{}", room(&target, free, held)?);
    let mut lines = Vec::new();
    let mut failed = Vec::new();
    for step in STEPS.iter().filter(|step| is_whole || args.steps.iter().any(|name| name == step.name)) {
        eprintln!("\n== {}", step.name);
        let started = Instant::now();
        let outcome = (step.run)();
        let seconds = started.elapsed().as_secs();
        match outcome {
            Ok(()) => lines.push(format!("ok      {seconds:>5} s  {}", step.name)),
            Err(error) => {
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
    STEPS.iter().map(|step| format!("{:width$}  {}\n", step.name, step.about)).collect()
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

fn format() -> Result<()> {
    shell::run(&mut shell::cargo(["fmt", "--all", "--check"]))?;
    shell::run(&mut shell::cargo(["fmt", "--manifest-path", EBPF, "--check"]))
}

fn lints() -> Result<()> {
    let strict = ["--locked", "--", "--deny", "warnings"];
    shell::run(shell::cargo(["clippy", "--workspace", "--all-targets"]).args(strict))?;
    // The agent without the features that only clusters need.
    let lean = ["clippy", "--package", "metadata-user", "--all-targets", "--no-default-features"];
    shell::run(shell::cargo(lean).args(strict))?;
    // The tests that need neither root nor a cluster.
    let plain = ["clippy", "--package", "xdp-imds-tests", "--all-targets", "--no-default-features"];
    shell::run(shell::cargo(plain).args(strict))?;
    shell::run(shell::cargo(["clippy", "--manifest-path", EBPF]).args(strict))
}

fn docs() -> Result<()> {
    let mut doc = shell::cargo(["doc", "--workspace", "--no-deps", "--document-private-items", "--locked"]);
    shell::run(doc.env("RUSTDOCFLAGS", "--deny warnings"))
}

fn deny() -> Result<()> {
    if shell::which("cargo-deny").is_none() {
        bail!("cargo-deny is missing; run `cargo install --locked cargo-deny`");
    }
    shell::run(&mut shell::cargo([
        "deny",
        "--locked",
        "check",
        "--hide-inclusion-graph",
        "bans",
        "licenses",
        "sources",
    ]))
}

/// Checks for known vulnerabilities. The advisory database comes over the network. A machine without network prints
/// `NOT CHECKED` and goes on with the other steps.
fn advisories() -> Result<()> {
    let fetched =
        shell::cargo(["deny", "--locked", "fetch", "db"]).stderr(std::process::Stdio::null()).status();
    if !fetched.is_ok_and(|status| status.success()) {
        eprintln!(
            "NOT CHECKED: the advisory database could not be fetched; run `cargo deny check advisories` online"
        );
        return Ok(());
    }
    shell::run(&mut shell::cargo(["deny", "--locked", "check", "--disable-fetch", "advisories"]))
}

fn object() -> Result<()> {
    xtask(&["build-ebpf", "--check"])
}

fn tests() -> Result<()> {
    xtask(&["test", "--require-privileged"])
}

/// Returns the agent that the tests use. After them this builds nothing.
fn agent() -> Result<PathBuf> {
    shell::run(&mut shell::cargo(["build", "--package", "metadata-user", "--bin", "xdp-imds"]))?;
    Ok(shell::target().join("debug/xdp-imds"))
}

/// Checks that README and book match the code, and that their links work.
fn book() -> Result<()> {
    let agent = agent()?;
    xtask(&["book", "--check", "--agent", &agent.to_string_lossy()])
}

/// Renders the manifests and validates them against their schemas.
fn manifests() -> Result<()> {
    xtask(&["manifests"])
}

/// Checks that builds in two directories have the same digest, and that a container of the image serves a guest.
fn image() -> Result<()> {
    xtask(&["image", "--check", "--try", "--profile", QUICK])
}

/// Builds the package around the image's binary, checks its contents, installs it and purges it.
fn package() -> Result<()> {
    xtask(&["deb", "--static", "--profile", QUICK])
}

/// Checks that the fuzz targets build. The ordinary tests run their assertions on the seeds.
fn fuzz_targets() -> Result<()> {
    let manifest = ["--manifest-path", "tests/fuzz/Cargo.toml"];
    shell::run(shell::cargo(["fmt"]).args(manifest).arg("--check"))?;
    let mut check = shell::cargo(["check", "--locked"]);
    // The workspace's target directory, so that shared dependencies are checked once.
    shell::run(check.args(manifest).arg("--target-dir").arg(shell::target()))
}

/// Runs unsafe code under Miri, which only nightly toolchains have. Without one it prints `NOT CHECKED`.
fn miri() -> Result<()> {
    if let Some(missing) = super::miri::missing() {
        eprintln!("NOT CHECKED: {missing}");
        return Ok(());
    }
    xtask(&["miri"])
}

/// Soaks the agent that the tests built for a minute, with churn, restarts and hostile guests.
fn soak() -> Result<()> {
    let agent = agent()?;
    xtask(&["soak", "--minutes", "1", "--agent", &agent.to_string_lossy()])
}

/// The attacks that say in half a minute whether tenants are apart and their input is bounded. The others, and all at
/// once, take longer than a change should wait: `cargo xtask soak --tenants --minutes 30` before a release.
const ATTACKS: &str =
    "equal-uuid,equal-uuid-slow,proxmox-uuid,yaml-bomb,proxmox-bomb,render-bomb,record-memory,attributes";

/// Serves a modest tenant among hostile ones, with the agent of the image.
fn tenants() -> Result<()> {
    let here = Architecture::named(std::env::consts::ARCH)?;
    let agent = here.products(&shell::target().join("image-build"), QUICK).join("xdp-imds");
    if !agent.is_file() {
        xtask(&["image", "--profile", QUICK])?;
    }
    let agent = agent.to_string_lossy();
    xtask(&["soak", "--tenants", "--minutes", "0.5", "--only", ATTACKS, "--agent", &agent])
}

/// Boots an old and a new kernel, and one for arm64, with the agent that the tests built.
fn kernels() -> Result<()> {
    xtask(&["kernels", "--short", "--kernel", "6.1,newest"])?;
    xtask(&["kernels", "--short", "--kernel", "6.12", "--arch", "arm64"])
}

/// The running program, also after a step has built it anew and Cargo has replaced its file.
const SELF: &str = "/proc/self/exe";

/// Runs another verb in a process of its own, as a person would.
fn xtask(words: &[&str]) -> Result<()> {
    let shown = format!("cargo xtask {}", words.join(" "));
    eprintln!("$ {shown}");
    let status = Command::new(SELF).args(words).current_dir(shell::top()).status();
    let status = status.with_context(|| format!("cannot run {shown}"))?;
    ensure!(status.success(), "{shown}: {status}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{GIB, LEAST_FREE, STEPS, WHOLE_RUN, held, list, room, xtask};
    use crate::{Cli, Verb};
    use clap::Parser as _;
    use std::path::Path;
    use std::process::Command;

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
    fn steps_are_chosen_by_name_and_an_unknown_one_is_refused() {
        for (line, expected) in [
            ("ci", Some(0)),
            ("ci tests book", Some(2)),
            ("ci --list", Some(0)),
            ("ci nosuch", None),
            ("ci --list tests", None),
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
                xtask(&arguments).expect("the removed program runs");
            }
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let copy = dir.path().join("xtask");
        std::fs::copy(own, &copy).expect("a copy");
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
}
