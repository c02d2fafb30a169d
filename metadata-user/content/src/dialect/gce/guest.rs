//! `instance/guest-attributes/<namespace>/<key>`: values the guest writes and reads back.

use std::sync::LazyLock;

use serde_json::{Map, Value};

use super::tree::{Etag, NodeShape, TreeNode};
use super::{PLAIN, found, not_allowed, refusal};
use crate::http::{Body, Method, StatusCode};
use crate::mailbox::{AttributeRefused, Mailbox};
use crate::store::{LiveOutcome, LiveRequest};

/// Random number of this run of the agent: the version of the attributes starts at 0 in each run.
static RUN: LazyLock<u64> = LazyLock::new(rand::random);

/// Writes or deletes an attribute.
pub(super) fn write(call: &LiveRequest<'_>, namespace: &str, key: &str) -> LiveOutcome {
    let mailbox = &call.vm.mailbox;
    match call.request.method {
        Method::Put => match mailbox.set_attribute(namespace, key, call.request.body) {
            Ok(()) => done(call.request.body),
            Err(AttributeRefused::Name) => refusal(StatusCode(400), &[]).into(),
            Err(AttributeRefused::TooLarge) => refusal(StatusCode(413), &[]).into(),
            Err(AttributeRefused::Full | AttributeRefused::TooMuch) => refusal(StatusCode(409), &[]).into(),
        },
        Method::Delete if mailbox.delete_attribute(namespace, key) => done(b""),
        Method::Delete => refusal(StatusCode(404), &[]).into(),
        _ => not_allowed(&[Method::Get, Method::Head, Method::Put, Method::Delete]).into(),
    }
}

fn done(bytes: &[u8]) -> LiveOutcome {
    LiveOutcome::Changed(found(PLAIN, Etag::of(&bytes.to_vec().into()), ""))
}

/// All guest attributes, one namespace, or one attribute.
pub(super) struct GuestView<'a> {
    mailbox: &'a Mailbox,
    at: At,
}

enum At {
    All,
    Namespace(String, Vec<String>),
    Attribute(bytes::Bytes),
}

impl<'a> GuestView<'a> {
    /// Returns the attributes at a path.
    pub(super) fn find(mailbox: &'a Mailbox, names: &[&str]) -> Option<Self> {
        let at = match names {
            [] => At::All,
            [namespace] => {
                let mut all = mailbox.attributes().into_iter();
                let (name, keys) = all.find(|(name, _)| name == namespace)?;
                At::Namespace(name, keys)
            }
            [namespace, key] => At::Attribute(mailbox.attribute(namespace, key)?),
            _ => return None,
        };
        Some(Self { mailbox, at })
    }

    /// Returns the hash of an attribute's value. The ETag of a directory changes with every change of any attribute,
    /// because a directory is too large to hash for each parked request after each write.
    pub(super) fn etag(&self) -> Etag {
        match &self.at {
            At::Attribute(bytes) => Etag::of(&bytes.clone().into()),
            At::All | At::Namespace(..) => {
                let version = RUN.wrapping_add(self.mailbox.attributes_version());
                Etag::of(&version.to_be_bytes().to_vec().into())
            }
        }
    }

    fn value(&self) -> Value {
        match &self.at {
            At::Attribute(bytes) => String::from_utf8_lossy(bytes).into(),
            At::All | At::Namespace(..) => {
                let members = self.children().into_iter().map(|(name, child)| (name, child.value()));
                members.collect::<Map<String, Value>>().into()
            }
        }
    }
}

impl TreeNode for GuestView<'_> {
    fn shape(&self) -> NodeShape {
        if matches!(self.at, At::Attribute(_)) { NodeShape::Leaf } else { NodeShape::Directory }
    }

    fn children(&self) -> Vec<(String, Self)> {
        let view = |at| Self { mailbox: self.mailbox, at };
        match &self.at {
            At::All => {
                let namespace =
                    |(name, keys): (String, Vec<String>)| (name.clone(), view(At::Namespace(name, keys)));
                self.mailbox.attributes().into_iter().map(namespace).collect()
            }
            At::Namespace(namespace, keys) => {
                let attribute = |key: &String| {
                    let bytes = self.mailbox.attribute(namespace, key)?;
                    Some((key.clone(), view(At::Attribute(bytes))))
                };
                keys.iter().filter_map(attribute).collect()
            }
            At::Attribute(_) => Vec::new(),
        }
    }

    fn json(&self) -> Body {
        self.value().to_string().into()
    }

    fn text(&self) -> Body {
        match &self.at {
            At::Attribute(bytes) => bytes.clone().into(),
            At::All | At::Namespace(..) => Body::default(),
        }
    }
}
