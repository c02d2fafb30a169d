//! Query parameters of requests below `/metadata`.

use std::borrow::Cow;

use super::{VERSIONS, bad, error};
use crate::dialect::json::json;
use crate::http::Response;

/// Number of versions that an error names.
const NEWEST: usize = 3;

/// `format`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Format {
    #[default]
    Json,
    Text,
}

/// Query parameters; none occurs twice.
#[derive(Debug)]
pub(super) struct Parameters<'a>(Vec<(String, Cow<'a, str>)>);

impl<'a> Parameters<'a> {
    /// Parses the query. `Err` is the answer if a parameter occurs twice or `api-version` is missing or malformed.
    pub(super) fn parse(text: &'a str) -> Result<Self, Response> {
        let mut parameters = Self(Vec::new());
        for (name, value) in form_urlencoded::parse(text.as_bytes()) {
            let name = name.to_ascii_lowercase();
            if parameters.get(&name).is_some() {
                return Err(bad("Query parameters must not be repeated"));
            }
            parameters.0.push((name, value));
        }
        if parameters.get("api-version").is_some_and(is_version) {
            return Ok(parameters);
        }
        let newest: Vec<&str> = VERSIONS.into_iter().rev().take(NEWEST).collect();
        let reason = "Bad request. api-version was not specified in the request or is not supported";
        Err(error(&json!({ "error": reason, "newest-versions": newest })))
    }

    /// Returns the value of a parameter. `name` is in lower case.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_ref())
    }
}

/// Parameters of a request for `/metadata/instance`.
#[derive(Debug)]
pub(super) struct Query {
    pub(super) format: Format,
    pub(super) extended: bool,
}

impl Query {
    pub(super) fn parse(text: &str) -> Result<Self, Response> {
        let parameters = Parameters::parse(text)?;
        let format = match parameters.get("format") {
            None => Format::default(),
            Some(name) if name.eq_ignore_ascii_case("json") => Format::Json,
            Some(name) if name.eq_ignore_ascii_case("text") => Format::Text,
            Some(_) => return Err(bad("format must be json or text")),
        };
        let extended = parameters.get("extended").is_some_and(|value| value.eq_ignore_ascii_case("true"));
        Ok(Self { format, extended })
    }
}

/// Returns whether a text is a date not before the first version. Clients send the version that they were written for,
/// which need not be in [`VERSIONS`].
fn is_version(text: &str) -> bool {
    let in_range = |part: &str, most: u8| part.parse::<u8>().is_ok_and(|number| (1..=most).contains(&number));
    text.len() == 10
        && text.bytes().enumerate().all(|(at, octet)| match at {
            4 | 7 => octet == b'-',
            _ => octet.is_ascii_digit(),
        })
        && in_range(&text[5..7], 12)
        && in_range(&text[8..], 31)
        && text >= VERSIONS[0]
}
