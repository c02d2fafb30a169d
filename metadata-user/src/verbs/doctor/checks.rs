//! Turns facts into checks. Each function here depends on its arguments only.

mod guests;
mod identity;
mod kernel;
mod node;
mod port;
mod privilege;
mod room;

#[cfg(test)]
mod tests;

use super::{Check, DoctorRequest, Facts};
use crate::verbs::options::DEFAULT_FILE;
pub(super) use privilege::user;
pub(super) use room::hidden;

/// Checks that the configuration can be used.
pub(super) fn configuration(question: &DoctorRequest) -> Check {
    let file = question.file.as_ref().map(|file| file.display().to_string());
    match (&question.config, file) {
        (Ok(_), None) if question.lacks_file => Check::fail(
            "configuration",
            format!("there is no {DEFAULT_FILE}, so no source of records is configured"),
            "the configuration of the service",
            "Put it there, or give the options of `serve`, such as --config FILE or --records DIR",
        ),
        (Ok(_), Some(file)) => Check::ok("configuration", format!("{file} can be used")),
        (Ok(_), None) => {
            Check::ok("configuration", "no configuration file is given; --config FILE names one")
        }
        (Err(reason), _) => Check::fail(
            "configuration",
            reason.clone(),
            "valid values",
            "Correct the configuration. The checks below use the default configuration",
        ),
    }
}

/// Runs all checks of facts. A check comes after the checks that it depends on.
pub(super) fn all(facts: &Facts) -> Vec<Check> {
    let mut checks = kernel::checks(facts);
    checks.extend(privilege::checks(facts));
    checks.extend(room::checks(facts));
    checks.extend(guests::checks(facts));
    checks.extend(node::checks(facts));
    checks.extend(facts.sources.iter().cloned());
    checks.extend(identity::checks(facts));
    checks.extend(port::checks(facts));
    checks.extend(node::problems(&facts.node, &checks));
    checks
}

/// Returns a number with its noun: `one port`, `2 ports`.
fn count(number: usize, what: &str) -> String {
    if number == 1 { format!("one {what}") } else { format!("{number} {what}s") }
}
