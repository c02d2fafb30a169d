//! Checks that the agent has the metrics that README and book name.

use super::code::Code;
use super::markdown::Page;

const PREFIX: &str = "xdp_imds_";

/// The prefix of the TCP stack's counters. The sources hold only the rest of these names as strings.
const STACK: &str = "xdp_imds_stack_";

/// Finds metrics that no source file names.
pub(super) fn findings(pages: &[Page], code: &Code) -> Vec<String> {
    let mut findings = Vec::new();
    for page in pages {
        for (line, span) in page.spans() {
            let missing = names(&span).filter(|name| !known(name, code));
            findings.extend(missing.map(|name| format!("{}: the agent has no metric {name}", page.at(line))));
        }
    }
    findings
}

fn names(span: &str) -> impl Iterator<Item = &str> {
    let words = span.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    words.filter(|word| word.starts_with(PREFIX) && word.len() > PREFIX.len())
}

fn known(name: &str, code: &Code) -> bool {
    let quoted = match name.strip_prefix(STACK) {
        Some(rest) => format!("\"{}\"", rest.strip_suffix("_total").unwrap_or(rest)),
        None => format!("\"{name}\""),
    };
    code.texts().any(|(_, text)| text.contains(&quoted))
}
