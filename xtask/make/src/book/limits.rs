//! Checks that each row of the limits page states the value of the constant it names.

use super::code::Code;
use super::markdown::Page;
use std::path::Path;

const PAGE: &str = "docs/src/reference/limits.md";

/// Finds constants that do not exist, and rows that do not state the value of their constant.
pub(super) fn findings(pages: &[Page], code: &Code) -> Vec<String> {
    let mut findings = Vec::new();
    let Some(page) = pages.iter().find(|page| page.path == Path::new(PAGE)) else {
        return vec![format!("{PAGE} is missing")];
    };
    for (line, cells) in page.rows() {
        let [what, limit, beyond, constants] = cells.as_slice() else { continue };
        let stated = format!("{what} {limit} {beyond}");
        for name in constants.split('`').skip(1).step_by(2) {
            let reason = match code.constant(name) {
                Ok(value) if value.forms().iter().any(|form| has(&stated, form)) => continue,
                Ok(value) => {
                    format!("the row does not state {name}, which is {}", value.forms().join(" or "))
                }
                Err(error) => format!("{error:#}"),
            };
            findings.push(format!("{}: {reason}", page.at(line)));
        }
    }
    findings
}

/// Returns true if a text has `form`, and not as part of a longer number.
fn has(text: &str, form: &str) -> bool {
    text.match_indices(form).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let mut after = text[at + form.len()..].chars();
        let next = after.next();
        let goes_on = matches!(next, Some(',' | '.')) && after.next().is_some_and(|c| c.is_ascii_digit());
        !before.is_some_and(|c| c.is_ascii_digit() || c == ',' || c == '.')
            && !goes_on
            && !next.is_some_and(|c| c.is_ascii_digit())
    })
}

#[cfg(test)]
mod tests {
    use super::has;

    #[test]
    fn a_form_inside_a_longer_number_does_not_count() {
        for (text, form, there) in [
            ("16,384 each", "16,384", true),
            ("116,384", "16,384", false),
            ("128; 64", "128", true),
            ("1,128,5", "128", false),
        ] {
            assert_eq!(has(text, form), there, "{text}");
        }
    }
}
