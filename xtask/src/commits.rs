//! The rule of commit messages: what changed in which area, then why and how it was tested.

use crate::ci::Outcome;
use anyhow::{Context as _, Result, ensure};
use std::process::Command;

/// Most columns of a subject, so that `git log --oneline` shows it whole.
const SUBJECT_COLUMNS: usize = 72;
/// The commit after which every message follows the rule.
const SINCE: &str = "48d7a080";
/// Ends a message in the output of git; no message has it.
const END: char = '\0';

/// Checks every commit since the rule. Without its first commit, as in a shallow clone, it checks nothing.
pub(crate) fn check() -> Result<Outcome> {
    let range = format!("{SINCE}..HEAD");
    let mut git = Command::new("git");
    git.args(["log", "--no-merges", "--format=%B%x00", &range]).current_dir(shell::top());
    let output = git.output().context("cannot run git")?;
    if !output.status.success() {
        let why = format!("git log {range}: {}", String::from_utf8_lossy(&output.stderr).trim());
        return Ok(Outcome::NotChecked(why));
    }
    let text = String::from_utf8(output.stdout).context("a commit message is not UTF-8")?;
    let messages = text.split(END).map(str::trim).filter(|message| !message.is_empty());
    let faults: Vec<_> = messages.filter_map(fault).collect();
    ensure!(
        faults.is_empty(),
        "{}\nmend them with `git rebase --interactive`; CONTRIBUTING.md has the rule",
        faults.join("\n")
    );
    Ok(Outcome::Passed)
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
    use super::fault;

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
