//! Builds the program of a verb and replaces this process by it. Help is printed without it.

use anyhow::{Context as _, Result, bail, ensure};
use shell::variables::PROGRAM_HELP;
use std::ffi::OsString;
use std::io::IsTerminal as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

/// The arguments of a verb, which only its program understands.
#[derive(clap::Args)]
pub(crate) struct Words {
    /// Options of the verb; see `cargo xtask VERB --help`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTIONS")]
    pub(crate) words: Vec<OsString>,
}

/// A program beside this one.
pub(crate) struct Program {
    /// The name of its package and of its executable.
    name: &'static str,
    /// The Cargo profile that builds it.
    profile: &'static str,
}

/// Guests, a node and the agent, with few dependencies to compile.
pub(crate) const DEMO: Program = Program { name: "xdp-imds-demo", profile: "demo" };
/// Kernels in QEMU, with few dependencies to compile.
pub(crate) const KERNELS: Program = Program { name: "xdp-imds-kernels", profile: "dev" };
/// The verbs that use the agent's own crates.
pub(crate) const LAB: Program = Program { name: "xdp-imds-lab", profile: "dev" };
/// The verbs that run the agent on hypervisors.
pub(crate) const LOAD: Program = Program { name: "xdp-imds-load", profile: "dev" };
/// The verbs that make or check committed or released files.
pub(crate) const MAKE: Program = Program { name: "xdp-imds-make", profile: "dev" };

/// The executables that `start` may build.
const PROGRAMS: [&str; 6] = ["xdp-imds", DEMO.name, KERNELS.name, LAB.name, LOAD.name, MAKE.name];
/// Options with which a demo needs no agent built: a request for help, or the path of an agent.
const WITHOUT_AGENT: [&str; 3] = ["--help", "-h", "--agent"];

impl Program {
    /// Builds the program and replaces this process by it, with this verb and these arguments. A request for help is
    /// answered at once.
    pub(crate) fn start(&self, verb: &str, words: &Words) -> Result<()> {
        let Words { words } = words;
        if let Some(help) = help(verb, words) {
            print!("{help}");
            return Ok(());
        }
        if let Some(path) = shell::built(self.name) {
            bail!("cannot start {}: {}", self.name, Command::new(path).arg(verb).args(words).exec());
        }
        let directory = if self.profile == "dev" { "debug" } else { self.profile };
        let path = shell::target().join(directory).join(self.name);
        let build = self.build(verb, words);
        let is_built = |word: &&str| path.with_file_name(word).is_file();
        let all_built = build.iter().filter(|word| PROGRAMS.contains(word)).all(is_built);
        let mut cargo = shell::cargo(build);
        if all_built && !std::io::stderr().is_terminal() {
            // Cargo has little or nothing to build, and a script wants only the verb's output.
            cargo.arg("--quiet");
        }
        let status = cargo.status().context("cannot run cargo")?;
        ensure!(status.success(), "{} does not build: {status}", self.name);
        let mut command = Command::new(path);
        command.arg(verb).args(words);
        bail!("cannot start {}: {}", self.name, command.exec())
    }

    /// Returns Cargo's arguments to build the program.
    fn build(&self, verb: &str, words: &[OsString]) -> Vec<&'static str> {
        let mut build = vec!["build", "--profile", self.profile, "--package", self.name, "--bin", self.name];
        let given = |word: &OsString| {
            let word = word.to_string_lossy();
            WITHOUT_AGENT.contains(&word.split('=').next().unwrap_or_default())
        };
        if verb == "demo" && !words.iter().any(given) {
            // One call compiles shared dependencies once. The demo needs no feature that only clusters use.
            build.extend(["--package", "metadata-user", "--no-default-features", "--bin", "xdp-imds"]);
        }
        build
    }
}

/// The page of the book that has the help of every verb. `cargo xtask book` makes it from the programs, and CI compares.
const PAGE: &str = "docs/src/contribute/xtask.md";
/// The verbs whose arguments are the command line of another program, which may have a `--help` of its own.
const WITH_COMMAND: [&str; 2] = ["run", "lab shell"];

/// Returns the help that a command line asks for, from the book: the program takes minutes to build. `None` if none is
/// asked for, or if the book lacks it.
fn help(verb: &str, words: &[OsString]) -> Option<String> {
    if std::env::var_os(PROGRAM_HELP).is_some() {
        return None;
    }
    let page = std::fs::read_to_string(shell::top().join(PAGE)).ok()?;
    let words: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
    let mut words: Vec<_> = words.iter().map(AsRef::as_ref).collect();
    let mut name = verb.to_owned();
    // `lab help up` is `lab up --help`.
    let nested = |name: &str, word: &str| section(&page, &format!("{name} {word}")).is_some();
    if words.first() == Some(&"help") && words.get(1).is_none_or(|word| nested(&name, word)) {
        words.remove(0);
        words.push("--help");
    }
    while words.first().is_some_and(|word| nested(&name, word)) {
        name = format!("{name} {}", words.remove(0));
    }
    let own = if WITH_COMMAND.contains(&&*name) { words.len().min(1) } else { words.len() };
    let asked =
        words[..own].iter().take_while(|word| **word != "--").any(|word| matches!(*word, "--help" | "-h"));
    if asked { section(&page, &name) } else { None }
}

/// Returns the help of a verb on the page.
fn section(page: &str, verb: &str) -> Option<String> {
    let head = format!("## cargo xtask {verb}");
    let mut lines =
        page.lines().skip_while(|line| *line != head).skip_while(|line| *line != "```text").skip(1);
    let text: String =
        lines.by_ref().take_while(|line| *line != "```").map(|line| format!("{line}\n")).collect();
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::{DEMO, LAB, help, section};
    use std::ffi::OsString;

    #[test]
    fn only_a_demo_that_is_given_no_agent_builds_one() {
        for (program, verb, line, expected) in [
            (DEMO, "demo", "", true),
            (DEMO, "demo", "--guests 5 --json", true),
            (DEMO, "demo", "--agent target/debug/xdp-imds", false),
            (DEMO, "demo", "--agent=target/debug/xdp-imds", false),
            (DEMO, "demo", "--help", false),
            (DEMO, "lab", "up", false),
            (LAB, "storm", "", false),
        ] {
            let words: Vec<OsString> = line.split_whitespace().map(Into::into).collect();
            let built = program.build(verb, &words).contains(&"metadata-user");
            assert_eq!(built, expected, "{verb} {line}");
        }
    }

    #[test]
    fn help_is_found_in_the_book_wherever_a_command_line_asks_for_it() {
        for (verb, line, expected) in [
            ("storm", "--help", Some("storm")),
            ("storm", "-h", Some("storm")),
            ("storm", "help", Some("storm")),
            ("storm", "--vms 100 --help", Some("storm")),
            ("storm", "--vms 100", None),
            ("storm", "-- --help", None),
            ("lab", "help", Some("lab")),
            ("lab", "up --help", Some("lab up")),
            ("lab", "help up", Some("lab up")),
            ("lab", "shell --help", Some("lab shell")),
            ("lab", "shell host ip --help", None),
            ("run", "--help", Some("run")),
            ("run", "serve --help", None),
            ("nosuch", "--help", None),
        ] {
            let words: Vec<OsString> = line.split_whitespace().map(Into::into).collect();
            let found = help(verb, &words);
            let usage = expected.map(|verb| format!("Usage: cargo xtask {verb} "));
            assert_eq!(found.is_some(), expected.is_some(), "{verb} {line}: {found:?}");
            let text = format!("{} ", found.unwrap_or_default().replace('\n', " "));
            assert!(text.contains(&usage.unwrap_or_default()), "{verb} {line}: {text}");
        }
    }

    #[test]
    fn a_section_ends_with_its_block() {
        let page = "## cargo xtask a\n\n```text\nA\n\nB\n```\n\n## cargo xtask b\n\n```text\nC\n```\n";
        assert_eq!(section(page, "a").as_deref(), Some("A\n\nB\n"));
        assert_eq!(section(page, "b").as_deref(), Some("C\n"));
        assert_eq!(section(page, "c"), None);
    }
}
