//! Nodes of the tree, with the names that paths use.

use std::fmt;

use bytes::Bytes;
use sha2::{Digest as _, Sha256};

use super::super::document::{Form, Node};
use crate::http::Body;

/// Hash of a value: the first 64 bits of SHA-256 of its JSON, in hex.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Etag(pub(super) u64);

impl Etag {
    pub(super) fn of(body: &Body) -> Self {
        let mut hash = Sha256::new();
        body.pieces().iter().for_each(|piece| hash.update(piece));
        let [a, b, c, d, e, f, g, h, ..] = <[u8; 32]>::from(hash.finalize());
        Self(u64::from_be_bytes([a, b, c, d, e, f, g, h]))
    }
}

impl fmt::Display for Etag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// How a node is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// Directory: one name per line.
    Directory,
    /// List of strings: one per line.
    List,
    /// List of strings: a JSON array unless the request asks for text.
    Array,
    /// Single value.
    Leaf,
}

/// A readable node.
pub(super) trait View: Sized {
    fn shape(&self) -> Shape;
    /// Returns the children in order, with the names that paths use.
    fn children(&self) -> Vec<(String, Self)>;
    /// Returns the node and everything below it as JSON.
    fn json(&self) -> Body;
    /// Returns a leaf as text.
    fn text(&self) -> Body;
    /// Returns the listed names whose values are computed per request.
    fn computed(&self) -> &'static [&'static str] {
        &[]
    }
}

/// Meaning of the names in a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Camel case in JSON, hyphens in paths.
    Usual,
    /// The same in JSON and paths.
    Verbatim,
    /// Service accounts.
    Accounts,
    /// Members of a service account.
    Account,
    /// Strings of a list.
    List,
    /// Strings of the tags, the only list that is JSON by default.
    Tags,
}

impl Place {
    /// Returns the meaning of the names in a child.
    fn of_member(self, name: &str) -> Self {
        match (self, name) {
            (Self::Usual, "attributes") => Self::Verbatim,
            (Self::Usual, "serviceAccounts") => Self::Accounts,
            (Self::Usual, "tags") => Self::Tags,
            (Self::Usual, "dnsServers" | "ipv6s") => Self::List,
            (Self::Usual, _) => Self::Usual,
            (Self::Accounts, _) => Self::Account,
            (Self::Account, "aliases" | "scopes") => Self::List,
            (Self::Verbatim | Self::Account | Self::List | Self::Tags, _) => Self::Verbatim,
        }
    }

    /// Returns the name of a member in paths.
    fn in_paths(self, name: &str) -> String {
        if self != Self::Usual {
            return name.to_owned();
        }
        let mut path = String::with_capacity(name.len() + 4);
        for letter in name.chars() {
            if letter.is_ascii_uppercase() {
                path.push('-');
            }
            path.push(letter.to_ascii_lowercase());
        }
        path
    }
}

/// A node of the document.
pub(super) struct TreeView<'a> {
    pub(super) node: Node<'a>,
    place: Place,
    /// Text of the leaf, if it is already available unescaped.
    pub(super) verbatim: Option<Bytes>,
    /// Names in a service account whose values are computed per request.
    computed: &'static [&'static str],
}

impl<'a> TreeView<'a> {
    pub(super) fn root(node: Node<'a>, computed: &'static [&'static str]) -> Self {
        Self { node, place: Place::Usual, verbatim: None, computed }
    }

    fn member(&self, name: &str, node: Node<'a>) -> Self {
        Self { node, place: self.place.of_member(name), verbatim: None, computed: self.computed }
    }

    /// Returns the child that a path segment names.
    pub(super) fn child(&self, segment: &str) -> Option<Self> {
        let mut members = self.node.members().into_iter();
        let (name, node) = members.find(|(name, _)| self.place.in_paths(name) == segment)?;
        Some(self.member(&name, node))
    }
}

impl View for TreeView<'_> {
    fn shape(&self) -> Shape {
        match (self.node.form(), self.place) {
            (Form::Scalar, _) => Shape::Leaf,
            (Form::Array, Place::List) => Shape::List,
            (Form::Array, Place::Tags) => Shape::Array,
            (Form::Array | Form::Object, _) => Shape::Directory,
        }
    }

    fn children(&self) -> Vec<(String, Self)> {
        let named = |(name, node): (std::borrow::Cow<'_, str>, _)| {
            (self.place.in_paths(&name), self.member(&name, node))
        };
        self.node.members().into_iter().map(named).collect()
    }

    fn json(&self) -> Body {
        self.node.json()
    }

    fn text(&self) -> Body {
        self.verbatim.clone().map_or_else(|| self.node.text(), Body::from)
    }

    fn computed(&self) -> &'static [&'static str] {
        if self.place == Place::Account { self.computed } else { &[] }
    }
}
