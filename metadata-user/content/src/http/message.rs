//! A parsed request, borrowed from the connection's receive buffer.

use std::fmt;

/// Request methods that metadata clients use (RFC 9110 §9). Every other token is [`Method::Other`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Method {
    /// GET.
    Get,
    /// HEAD; gets the answer to GET without the body.
    Head,
    /// POST.
    Post,
    /// PUT.
    Put,
    /// PATCH.
    Patch,
    /// DELETE.
    Delete,
    /// OPTIONS.
    Options,
    /// Any other method.
    Other,
}

impl Method {
    /// Parses a method token, case-sensitively (RFC 9110 §9.1).
    #[must_use]
    pub fn from_token(token: &str) -> Self {
        match token {
            "GET" => Self::Get,
            "HEAD" => Self::Head,
            "POST" => Self::Post,
            "PUT" => Self::Put,
            "PATCH" => Self::Patch,
            "DELETE" => Self::Delete,
            "OPTIONS" => Self::Options,
            _ => Self::Other,
        }
    }
}

impl Method {
    /// Returns the method token; `?` for [`Method::Other`].
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Head => "HEAD",
            Self::Post => "POST",
            Self::Put => "PUT",
            Self::Patch => "PATCH",
            Self::Delete => "DELETE",
            Self::Options => "OPTIONS",
            Self::Other => "?",
        }
    }
}

/// Header fields of a request, in the order received.
#[derive(Clone, Copy)]
pub struct Headers<'a> {
    fields: &'a [httparse::Header<'a>],
}

impl fmt::Debug for Headers<'_> {
    /// Prints field names only: values may be tokens and signatures.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.fields.iter().map(|field| field.name)).finish()
    }
}

impl<'a> Headers<'a> {
    /// Wraps parsed fields.
    #[must_use]
    pub fn new(fields: &'a [httparse::Header<'a>]) -> Self {
        Self { fields }
    }

    /// Returns the first value of a field, without surrounding white space. Names are case-insensitive (RFC 9110 §5.1).
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&'a [u8]> {
        self.fields.iter().find(|f| f.name.eq_ignore_ascii_case(name)).map(|f| f.value.trim_ascii())
    }

    /// Returns every value of a field in the order received, without surrounding white space.
    pub fn all<'s>(&'s self, name: &'s str) -> impl Iterator<Item = &'a [u8]> + 's {
        self.fields.iter().filter(move |f| f.name.eq_ignore_ascii_case(name)).map(|f| f.value.trim_ascii())
    }

    /// Returns whether a comma-separated list field (RFC 9110 §5.6.1) contains `token`, ignoring case.
    #[must_use]
    pub fn has_token(&self, name: &str, token: &str) -> bool {
        let mut items = self.all(name).flat_map(|value| value.split(|octet| *octet == b','));
        items.any(|item| item.trim_ascii().eq_ignore_ascii_case(token.as_bytes()))
    }

    /// Returns all fields as received.
    pub fn iter(&self) -> impl Iterator<Item = (&'a str, &'a [u8])> {
        self.fields.iter().map(|field| (field.name, field.value))
    }

    /// Returns whether the field is present; an empty value counts.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.get(name).is_some()
    }
}

/// A request target after normalisation: without empty segments, with escapes decoded, and with the query split off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target<'a> {
    /// Path: `/` for the root, else `/a/b` without a trailing slash.
    pub path: &'a str,
    /// Text after the first `?`, not decoded; empty if there is none.
    pub query: &'a str,
}

/// One complete request.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// Request method.
    pub method: Method,
    /// Normalised request target.
    pub target: Target<'a>,
    /// Header fields in the order received.
    pub headers: Headers<'a>,
    /// Body; empty if the request has none.
    pub body: &'a [u8],
}

impl fmt::Debug for Request<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { method, target, headers, body } = self;
        let mut shown = f.debug_struct("Request");
        shown.field("method", method).field("target", target).field("headers", headers);
        shown.field("body_octets", &body.len()).finish()
    }
}
