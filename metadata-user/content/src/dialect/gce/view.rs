//! A place in the tree, by the names paths use.

use std::fmt;

use bytes::Bytes;
use sha2::{Digest as _, Sha256};

use super::super::document::{Form, Node};
use crate::http::Body;

/// What stands for a value, and changes with it: the first 64 bits of SHA-256 of its JSON, in hex.
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

/// How a place is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// Its names, each on a line.
    Directory,
    /// A list of strings, each on a line.
    List,
    /// One value.
    Leaf,
}

/// A place that can be read.
pub(super) trait View: Sized {
    fn shape(&self) -> Shape;
    /// What is in it, by the names paths use, in order.
    fn children(&self) -> Vec<(String, Self)>;
    /// As JSON, with all there is below.
    fn json(&self) -> Body;
    /// A leaf as text.
    fn text(&self) -> Body;
    /// Names a directory lists that have no value until they are asked for.
    fn computed(&self) -> &'static [&'static str] {
        &[]
    }
}

/// What the names in a place are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Camel case, and hyphens in paths.
    Usual,
    /// The same in both.
    Verbatim,
    /// Service accounts.
    Accounts,
    /// What a service account has.
    Account,
    /// Strings of a list.
    List,
}

impl Place {
    /// What the names in a member of this place are.
    fn of_member(self, name: &str) -> Self {
        match (self, name) {
            (Self::Usual, "attributes") => Self::Verbatim,
            (Self::Usual, "serviceAccounts") => Self::Accounts,
            (Self::Usual, "tags" | "dnsServers" | "ipv6s") => Self::List,
            (Self::Usual, _) => Self::Usual,
            (Self::Accounts, _) => Self::Account,
            (Self::Account, "aliases" | "scopes") => Self::List,
            (Self::Verbatim | Self::Account | Self::List, _) => Self::Verbatim,
        }
    }

    /// A member's name in paths.
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

/// A place in the document.
pub(super) struct TreeView<'a> {
    pub(super) node: Node<'a>,
    place: Place,
    /// The text of the leaf, where it is at hand.
    pub(super) verbatim: Option<Bytes>,
    /// Service accounts have a token.
    tokens: bool,
}

impl<'a> TreeView<'a> {
    pub(super) fn root(node: Node<'a>, tokens: bool) -> Self {
        Self { node, place: Place::Usual, verbatim: None, tokens }
    }

    fn member(&self, name: &str, node: Node<'a>) -> Self {
        Self { node, place: self.place.of_member(name), verbatim: None, tokens: self.tokens }
    }

    /// What `segment` names here.
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
        if self.place == Place::Account && self.tokens { &["identity", "token"] } else { &[] }
    }
}
