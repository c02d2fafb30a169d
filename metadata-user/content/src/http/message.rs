//! A parsed request, borrowed from the connection's receive buffer.

use std::fmt;

/// The request methods a metadata service meets (RFC 9110 §9); every other token is [`Method::Other`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Method {
    /// GET
    Get,
    /// HEAD: answered as GET, without the body.
    Head,
    /// POST
    Post,
    /// PUT
    Put,
    /// PATCH
    Patch,
    /// DELETE
    Delete,
    /// OPTIONS
    Options,
    /// Any other method.
    Other,
}

impl Method {
    /// Reads a method token; case matters (RFC 9110 §9.1).
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
    /// The token; `?` for one that is not known.
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
    /// Names only: values are tokens and signatures now and then.
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

    /// The first value of a field, by case-insensitive name (RFC 9110 §5.1), white space trimmed.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&'a [u8]> {
        self.fields.iter().find(|f| f.name.eq_ignore_ascii_case(name)).map(|f| f.value.trim_ascii())
    }

    /// Every value of a field, in the order received, white space trimmed.
    pub fn all<'s>(&'s self, name: &'s str) -> impl Iterator<Item = &'a [u8]> + 's {
        self.fields.iter().filter(move |f| f.name.eq_ignore_ascii_case(name)).map(|f| f.value.trim_ascii())
    }

    /// True when a field that is a comma-separated list (RFC 9110 §5.6.1) contains `token`, in any case.
    #[must_use]
    pub fn has_token(&self, name: &str, token: &str) -> bool {
        let mut items = self.all(name).flat_map(|value| value.split(|octet| *octet == b','));
        items.any(|item| item.trim_ascii().eq_ignore_ascii_case(token.as_bytes()))
    }

    /// All fields, as received.
    pub fn iter(&self) -> impl Iterator<Item = (&'a str, &'a [u8])> {
        self.fields.iter().map(|field| (field.name, field.value))
    }

    /// True when the field is present, also with an empty value.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.get(name).is_some()
    }
}

/// A request target after normalisation: empty segments dropped, escapes decoded, query cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target<'a> {
    /// `/` for the root, else `/a/b` without a trailing slash.
    pub path: &'a str,
    /// What followed the first `?`, undecoded; empty when there was none.
    pub query: &'a str,
}

/// One request, complete with its body.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// The method.
    pub method: Method,
    /// The normalised target.
    pub target: Target<'a>,
    /// The header fields.
    pub headers: Headers<'a>,
    /// The body; empty for a request without one.
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
