//! Stamps of steps that have passed. A step whose inputs are unchanged since is not run again.
//!
//! A stamp is a file in the target directory with a digest of what the step depends on: files by their content, tools by
//! their versions. Git tells the files, so a tree without Git has no stamps, and every step runs.

use super::Outcome;
use anyhow::{Context as _, Result, ensure};
use std::fs;
use std::io::{Seek as _, Write as _};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// What every step depends on: the compiler, the dependencies, and the steps themselves.
const ALWAYS: [&str; 7] =
    [".cargo", ".ci", "Cargo.lock", "Cargo.toml", "rust-toolchain.toml", "xtask/shell", "xtask/src"];
/// Commands that print what this machine brings: versions of compilers and tools, of every Debian package, and of the
/// running kernel.
const MACHINE: [&[&str]; 8] = [
    &["rustc", "-vV"],
    &["rustup", "toolchain", "list"],
    &["bpf-linker", "--version"],
    &["cargo-deb", "--version"],
    &["cargo-deny", "--version"],
    &["mdbook", "--version"],
    &["dpkg-query", "--show"],
    &["uname", "-rm"],
];
/// Variables that change what a step does, by their first characters.
const VARIABLES: [&str; 3] = ["CARGO_PROFILE_", "RUSTFLAGS", "XDP_IMDS_"];

/// The stamps of a tree.
pub(super) struct Stamps {
    top: PathBuf,
    dir: PathBuf,
    /// What the commands of [`MACHINE`] print, and the variables.
    machine: String,
}

impl Stamps {
    /// Returns the stamps of this project.
    pub(super) fn here() -> Self {
        let mut machine: Vec<_> = MACHINE.iter().map(|words| printed(words)).collect();
        let is_known = |name: &str| VARIABLES.iter().any(|prefix| name.starts_with(prefix));
        machine.extend(std::env::vars().filter(|(name, _)| is_known(name)).map(|pair| format!("{pair:?}")));
        Self { top: shell::top().to_owned(), dir: shell::target().join("ci"), machine: machine.join("\n") }
    }

    /// Runs a step, unless it has passed with the same inputs. One that is forced, or has no inputs, runs each time.
    pub(super) fn run(
        &self,
        name: &str,
        inputs: &[&[&str]],
        is_forced: bool,
        step: impl FnOnce() -> Result<Outcome>,
    ) -> Result<Outcome> {
        if inputs.is_empty() {
            return step();
        }
        let stamp = self.dir.join(name);
        let digest = self.digest(name, inputs).ok();
        if !is_forced && digest.is_some() && fs::read_to_string(&stamp).ok() == digest {
            return Ok(Outcome::Unchanged);
        }
        // Before it runs: a step that is interrupted has not passed.
        if stamp.exists() {
            fs::remove_file(&stamp).with_context(|| format!("cannot remove {}", stamp.display()))?;
        }
        let outcome = step()?;
        // A file that changed while the step ran may not be what it saw.
        if let (Outcome::Passed, Some(digest)) = (&outcome, digest)
            && self.digest(name, inputs).ok().as_ref() == Some(&digest)
        {
            fs::create_dir_all(&self.dir)
                .and_then(|()| fs::write(&stamp, digest))
                .with_context(|| format!("cannot write {}", stamp.display()))?;
        }
        Ok(outcome)
    }

    /// Returns a digest of everything that a step depends on: committed, changed and new files below the paths.
    fn digest(&self, name: &str, inputs: &[&[&str]]) -> Result<String> {
        let paths: Vec<_> = ALWAYS.iter().chain(inputs.iter().copied().flatten()).copied().collect();
        let list = |options: &[&str]| self.git(&[&["ls-files", "-z"], options, &["--"], &paths].concat(), "");
        let tracked = list(&["--stage"])?;
        let changed = list(&["--modified", "--others", "--exclude-standard"])?;
        // A file that is gone has no content, and stays in the list of changed ones.
        let there = changed.split_terminator('\0').filter(|path| self.top.join(path).is_file());
        let there: String = there.map(|path| format!("{path}\n")).collect();
        let contents = self.git(&["hash-object", "--stdin-paths"], &there)?;
        let text = [name, &self.machine, &tracked, &changed, &contents].join("\n");
        self.git(&["hash-object", "--stdin"], &text)
    }

    /// Runs git with this input, and returns its output.
    fn git(&self, words: &[&str], input: &str) -> Result<String> {
        let mut file = tempfile::tempfile()?;
        file.write_all(input.as_bytes())?;
        file.rewind()?;
        let mut git = Command::new("git");
        let output = git.args(words).current_dir(&self.top).stdin(file).output().context("cannot run git")?;
        ensure!(output.status.success(), "git: {}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(String::from_utf8(output.stdout)?)
    }
}

/// Returns what a command prints; nothing if it is missing or fails.
fn printed(words: &[&str]) -> String {
    let mut command = Command::new(words[0]);
    let command = command.args(&words[1..]).current_dir(shell::top()).stdin(Stdio::null());
    command.output().map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default()
}

/// True if a path of the project exists, or a pattern that Git would match with more than one.
#[cfg(test)]
pub(super) fn is_known(path: &str) -> bool {
    path.contains('*') || shell::top().join(path).exists()
}

#[cfg(test)]
mod tests {
    use super::super::Outcome;
    use super::{ALWAYS, Stamps, is_known};
    use anyhow::{Result, bail};
    use std::fs;
    use std::path::Path;
    use tempfile::TempDir;

    const INPUTS: &[&[&str]] = &[&["agent"], &["*.toml"]];

    /// A tree with a file of the agent, a manifest and a page, all tracked.
    fn tree() -> (TempDir, Stamps) {
        let room = tempfile::tempdir().expect("a directory");
        let top = room.path().join("tree");
        for (name, text) in [("agent/main.rs", "1"), ("lab/Cargo.toml", "1"), ("docs/page.md", "1")] {
            let path = top.join(name);
            fs::create_dir_all(path.parent().expect("a directory")).expect("made");
            fs::write(path, text).expect("written");
        }
        let stamps = Stamps { top, dir: room.path().join("stamps"), machine: "rustc 1".into() };
        for words in [&["init", "--quiet"][..], &["add", "."]] {
            stamps.git(words, "").expect("git");
        }
        (room, stamps)
    }

    fn digest(stamps: &Stamps) -> String {
        stamps.digest("tests", INPUTS).expect("a digest")
    }

    /// Runs a step; true if it was not skipped.
    fn ran(stamps: &Stamps, is_forced: bool, outcome: Result<Outcome>) -> bool {
        let mut has_run = false;
        let run = || {
            has_run = true;
            outcome
        };
        let _ = stamps.run("tests", INPUTS, is_forced, run);
        has_run
    }

    #[test]
    fn the_digest_of_a_step_follows_its_inputs_and_nothing_else() {
        type Change = fn(&Path);
        let cases: [(&str, Change, bool); 6] = [
            ("a changed file", |top| fs::write(top.join("agent/main.rs"), "2").expect("written"), true),
            ("a new file", |top| fs::write(top.join("agent/new.rs"), "1").expect("written"), true),
            ("a deleted file", |top| fs::remove_file(top.join("agent/main.rs")).expect("removed"), true),
            ("a pattern", |top| fs::write(top.join("lab/Cargo.toml"), "2").expect("written"), true),
            ("another file", |top| fs::write(top.join("docs/page.md"), "2").expect("written"), false),
            ("another new file", |top| fs::write(top.join("docs/new.md"), "1").expect("written"), false),
        ];
        for (name, change, expected) in cases {
            let (_room, stamps) = tree();
            let before = digest(&stamps);
            assert_eq!(digest(&stamps), before, "{name}");
            change(&stamps.top);
            assert_eq!(digest(&stamps) != before, expected, "{name}");
        }
    }

    #[test]
    fn the_digest_follows_every_change_of_a_changed_file_the_tools_and_the_step() {
        let (_room, mut stamps) = tree();
        let mut seen = vec![digest(&stamps)];
        for text in ["2", "3"] {
            fs::write(stamps.top.join("agent/main.rs"), text).expect("written");
            seen.push(digest(&stamps));
        }
        stamps.machine = "rustc 2".into();
        seen.push(digest(&stamps));
        seen.push(stamps.digest("soak", INPUTS).expect("a digest"));
        let different: std::collections::BTreeSet<_> = seen.iter().collect();
        assert_eq!(different.len(), seen.len(), "{seen:?}");
    }

    #[test]
    fn only_a_step_that_has_passed_is_skipped() {
        let (_room, stamps) = tree();
        assert!(ran(&stamps, false, Err(anyhow::anyhow!("broken"))), "a first run");
        assert!(ran(&stamps, false, Ok(Outcome::NotChecked("no network".into()))), "after a failure");
        assert!(ran(&stamps, false, Ok(Outcome::Passed)), "after a run that checked nothing");
        assert!(!ran(&stamps, false, Ok(Outcome::Passed)), "after it passed");
        assert!(ran(&stamps, true, Ok(Outcome::Passed)), "forced");
        assert!(!ran(&stamps, false, Ok(Outcome::Passed)), "after it passed again");
        assert!(ran(&stamps, true, Err(anyhow::anyhow!("broken"))), "forced");
        assert!(ran(&stamps, false, Ok(Outcome::Passed)), "the failure took the stamp away");
    }

    #[test]
    fn a_step_whose_inputs_change_while_it_runs_leaves_no_stamp() {
        let (_room, stamps) = tree();
        let edit = || {
            fs::write(stamps.top.join("agent/main.rs"), "2")?;
            Ok(Outcome::Passed)
        };
        stamps.run("tests", INPUTS, false, edit).expect("it passes");
        assert!(ran(&stamps, false, Ok(Outcome::Passed)));
    }

    #[test]
    fn without_git_every_step_runs() {
        let (_room, stamps) = tree();
        fs::remove_dir_all(stamps.top.join(".git")).expect("removed");
        for _ in 0..2 {
            assert!(ran(&stamps, false, Ok(Outcome::Passed)));
        }
        let failed = stamps.run("tests", INPUTS, false, || bail!("broken"));
        assert!(failed.is_err());
    }

    #[test]
    fn what_every_step_depends_on_exists() {
        for path in ALWAYS {
            assert!(is_known(path), "{path}");
        }
    }
}
