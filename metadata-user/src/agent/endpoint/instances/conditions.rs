//! `If-Match` and `If-None-Match` (RFC 9110 §13.1).

use axum::http::{HeaderMap, header};

use super::answer::{bad_request, none, precondition};
use metadata_control::instances::ApiProblem;
use metadata_feed::registry::RecordId;

/// The conditions of a request.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct RequestConditions {
    matches: Option<Tags>,
    differs: Option<Tags>,
}

/// The value of a field.
#[derive(Debug, PartialEq, Eq)]
enum Tags {
    /// `*`: any entity tag.
    Any,
    These(Vec<String>),
}

impl RequestConditions {
    pub(super) fn read(head: &HeaderMap) -> Result<Self, ApiProblem> {
        Ok(Self { matches: tags(head, header::IF_MATCH)?, differs: tags(head, header::IF_NONE_MATCH)? })
    }

    /// Checks the conditions of a change against the entity tag of the registered record, if there is one.
    ///
    /// # Errors
    /// If a condition does not hold.
    pub(super) fn check(&self, id: &RecordId, etag: Option<&str>) -> Result<(), ApiProblem> {
        let found =
            || etag.map_or_else(|| format!("{id} does not exist"), |etag| format!("{id} has the tag {etag}"));
        if let (Some(Tags::Any), None) = (&self.matches, etag) {
            return Err(precondition(none(id)));
        }
        if self.matches.as_ref().is_some_and(|tags| !tags.have(etag)) {
            let advice = "read it again (`xdp-imds get`, GET) before another change";
            return Err(precondition(format!(
                "If-Match (`--if-match`) does not hold: {}; {advice}",
                found()
            )));
        }
        if self.differs.as_ref().is_some_and(|tags| tags.have(etag)) {
            let advice = "choose another name, or leave `--new` out to replace what is registered";
            return Err(precondition(format!(
                "`--new` (If-None-Match) does not hold: {}; {advice}",
                found()
            )));
        }
        Ok(())
    }

    /// True if the client of a GET has the record with this entity tag.
    pub(super) fn is_known(&self, etag: Option<&str>) -> bool {
        self.differs.as_ref().is_some_and(|tags| tags.have(etag))
    }
}

impl Tags {
    fn have(&self, etag: Option<&str>) -> bool {
        match self {
            Self::Any => etag.is_some(),
            Self::These(tags) => etag.is_some_and(|etag| tags.iter().any(|tag| tag == etag)),
        }
    }
}

fn tags(head: &HeaderMap, field: header::HeaderName) -> Result<Option<Tags>, ApiProblem> {
    let mut these = Vec::new();
    for value in head.get_all(&field) {
        let text = value.to_str().unwrap_or_default().trim();
        if text == "*" {
            return Ok(Some(Tags::Any));
        }
        for tag in text.split(',').map(str::trim) {
            // Entity tags of this agent contain no comma.
            if tag.len() < 2 || !tag.trim_start_matches("W/").starts_with('"') || !tag.ends_with('"') {
                let expected = format!("`*` or entity tags in double quotes in {field}");
                return Err(bad_request(&expected, "something else"));
            }
            these.push(tag.to_owned());
        }
    }
    Ok((!these.is_empty()).then_some(Tags::These(these)))
}

#[cfg(test)]
mod tests {
    use super::RequestConditions;
    use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
    use metadata_content::source::RecordSource;
    use metadata_feed::registry::RecordId;

    fn read(fields: &[(HeaderName, &'static str)]) -> Result<RequestConditions, u16> {
        let mut head = HeaderMap::new();
        for (field, value) in fields {
            head.append(field, HeaderValue::from_static(value));
        }
        RequestConditions::read(&head).map_err(|problem| problem.status)
    }

    #[test]
    fn a_change_is_made_when_its_conditions_hold() {
        let (is, not) = (header::IF_MATCH, header::IF_NONE_MATCH);
        let id = RecordId::new(RecordSource::Api, "a");
        for (fields, etag, holds) in [
            (&[][..], None, true),
            (&[], Some("\"1\""), true),
            (&[(is.clone(), "\"1\"")], Some("\"1\""), true),
            (&[(is.clone(), "\"0\", \"1\"")], Some("\"1\""), true),
            (&[(is.clone(), "\"0\""), (is.clone(), "\"1\"")], Some("\"1\""), true),
            (&[(is.clone(), "\"2\"")], Some("\"1\""), false),
            // A strong comparison: a weak tag matches nothing (RFC 9110 §13.1.1).
            (&[(is.clone(), "W/\"1\"")], Some("\"1\""), false),
            (&[(is.clone(), "\"1\"")], None, false),
            (&[(is.clone(), "*")], Some("\"1\""), true),
            (&[(is.clone(), "*")], None, false),
            (&[(not.clone(), "*")], None, true),
            (&[(not.clone(), "*")], Some("\"1\""), false),
            (&[(not.clone(), "\"1\"")], Some("\"1\""), false),
            (&[(not.clone(), "\"2\"")], Some("\"1\""), true),
        ] {
            let conditions = read(fields).expect("fields as they should be");
            assert_eq!(conditions.check(&id, etag).is_ok(), holds, "{fields:?} of {etag:?}");
        }
    }

    #[test]
    fn a_malformed_tag_is_refused() {
        for value in ["1", "\"1", "", "\"1\" \"2", "*, \"1\"x"] {
            assert_eq!(read(&[(header::IF_MATCH, value)]), Err(400), "{value}");
        }
    }
}
