//! The tree of texts, read from the document per request.

use bytes::Bytes;

use crate::dialect::document::{Document, Form, Node};
use crate::dialect::sheet::TEXT;
use crate::http::{Body, Response, Status};
use crate::store::{Call, Live, Outcome};

/// Names at the top of the tree, with the document's members that they show. UpCloud's names, with underscores, are
/// served but not listed.
const TOP: [(&str, &str); 12] = [
    ("id", "droplet_id"),
    ("hostname", "hostname"),
    ("public-keys", "public_keys"),
    ("public_keys", "public_keys"),
    ("region", "region"),
    ("instance_id", "instance_id"),
    ("interfaces", "interfaces"),
    ("dns", "dns"),
    ("floating_ip", "floating_ip"),
    ("reserved_ip", "reserved_ip"),
    ("tags", "tags"),
    ("features", "features"),
];

/// Listing of the top.
const LISTED: [&str; 12] = [
    "id",
    "hostname",
    "user-data",
    "vendor-data",
    "public-keys",
    "region",
    "interfaces/",
    "dns/",
    "floating_ip/",
    "reserved_ip/",
    "tags/",
    "features/",
];

/// Serves everything below `/metadata/v1` except user-data and vendor-data.
#[derive(Debug)]
pub(super) struct Tree {
    document: Document,
}

impl Tree {
    pub(super) fn new(document: Document) -> Self {
        Self { document }
    }

    fn text(&self, rest: &str) -> Option<Body> {
        let mut segments = rest.split('/').skip(1);
        let Some(top) = segments.next() else { return Some(self.listing().into()) };
        let (_, member) = TOP.into_iter().find(|(name, _)| *name == top)?;
        let mut node = self.document.root().member(|name| name == member)?;
        for segment in segments {
            node = node.member(|name| shown(name) == segment)?;
        }
        Some(text(node))
    }

    fn listing(&self) -> String {
        let root = self.document.root();
        let has_ipv4 = root.member(|name| name == "reserved_ip").is_some();
        let exists = |name: &&str| has_ipv4 || !name.ends_with("_ip/");
        LISTED.iter().filter(|name| exists(name)).copied().collect::<Vec<_>>().join("\n")
    }
}

/// Returns the tree's name for a member of the document.
fn shown(name: &str) -> &str {
    if name == "ip_address" { "address" } else { name }
}

/// Returns a scalar, a list with one item per line, or the names below; without a final newline.
pub(in crate::dialect) fn text(node: Node<'_>) -> Body {
    let is_tree = |node: Node<'_>| match node.form() {
        Form::Object => true,
        Form::Array => node.members().iter().any(|(_, member)| member.form() == Form::Object),
        Form::Scalar => false,
    };
    let lines: Vec<Bytes> = match node.form() {
        Form::Scalar => return node.text(),
        Form::Array if !is_tree(node) => {
            node.members().into_iter().map(|(_, member)| member.text().to_bytes()).collect()
        }
        Form::Array | Form::Object => {
            let name = |(name, member): (std::borrow::Cow<'_, str>, Node<'_>)| {
                format!("{}{}", shown(&name), if is_tree(member) { "/" } else { "" }).into()
            };
            node.members().into_iter().map(name).collect()
        }
    };
    lines.join(&b'\n').into()
}

impl Live for Tree {
    fn answer(&self, call: &Call<'_>) -> Outcome {
        match self.text(call.rest) {
            Some(text) => Response::new(Status(200), Some(TEXT), &[], text).into(),
            None => Response::error(Status(404), &[]).into(),
        }
    }

    fn about(&self) -> &'static str {
        "a text of /metadata/v1.json"
    }
}
