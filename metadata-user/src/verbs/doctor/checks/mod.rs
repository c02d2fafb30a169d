//! Judges the facts. The functions here are pure.

mod kernel;
mod kubevirt;
mod node;
mod port;
mod privilege;
mod room;

#[cfg(test)]
mod tests;

use super::{Check, Facts, Question};

/// Whether the configuration can be used.
pub(super) fn configuration(question: &Question) -> Check {
    let file = question.file.as_ref().map(|file| file.display().to_string());
    match (&question.config, file) {
        (Ok(_), Some(file)) => Check::ok("configuration", format!("{file} can be used")),
        (Ok(_), None) => Check::ok("configuration", "no file is given; --config FILE checks a file"),
        (Err(reason), _) => Check::fail(
            "configuration",
            reason.clone(),
            "valid values",
            "Correct the configuration; the checks below use the default one",
        ),
    }
}

/// All checks. Each check comes after the checks that it depends on.
pub(super) fn all(facts: &Facts) -> Vec<Check> {
    let mut checks = kernel::checks(facts);
    checks.extend(privilege::checks(facts));
    checks.extend(room::checks(facts));
    checks.extend(node::checks(facts));
    checks.extend(kubevirt::checks(facts));
    checks.extend(port::checks(facts));
    checks
}

/// `one port`, `2 ports`.
fn count(number: usize, what: &str) -> String {
    if number == 1 { format!("one {what}") } else { format!("{number} {what}s") }
}
