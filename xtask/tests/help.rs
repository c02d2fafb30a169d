//! Help costs no build: `cargo xtask VERB --help` starts nothing. Errors are for people.

use shell::variables::BUILT;
use std::process::Command;

fn xtask(words: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    // A build would fail, loudly.
    command.args(words).env("CARGO", "/nonexistent/cargo").env("PATH", "/nonexistent");
    let output = command.output().expect("it starts");
    assert!(output.status.success(), "{words:?}: {output:?}");
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn an_error_has_its_causes_and_no_backtrace() {
    for (variable, value) in
        [("RUST_BACKTRACE", "0"), ("RUST_BACKTRACE", "1"), ("RUST_LIB_BACKTRACE", "full")]
    {
        let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
        command.args(["lab", "down"]).env("CARGO", "/nonexistent/cargo").env("PATH", "/nonexistent");
        command.env_remove(BUILT).env(variable, value);
        let output = command.output().expect("it starts");
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(
            text, "Error: cannot run cargo: No such file or directory (os error 2)\n",
            "{variable}={value}"
        );
        assert_eq!(output.status.code(), Some(1), "{variable}={value}");
    }
}

#[test]
fn the_help_of_every_verb_is_there_without_a_build() {
    let help = xtask(&["--help"]);
    let verbs: Vec<_> = help
        .lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| !line.is_empty())
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|verb| *verb != "help")
        .collect();
    assert!(verbs.len() > 20, "{verbs:?}");
    for verb in verbs {
        let usage = format!("Usage: cargo xtask {verb}");
        for words in [&[verb, "--help"][..], &[verb, "-h"], &["help", verb]] {
            let help = xtask(words);
            assert!(help.contains(&usage), "{words:?}: {help}");
        }
    }
}
