//! The tree while it is built. Adding a leaf adds its name to the listings above it.
//!
//! A crawler descends into names that end with `/`, reads the others, and drops everything if one of them is not 200.
//! So every listed name is a route.

use std::borrow::Cow;
use std::collections::BTreeMap;

use bytes::Bytes;

use super::super::route_builder::{RouteBuilder, TEXT};
use crate::http::{Response, StatusCode};
use crate::store::{LiveOutcome, LiveRequest, LiveRoute, Methods, RequestGuard};

/// Root of the tree. It lists its children without slashes, as AWS does.
const ROOT: &str = "/latest";

/// Routes below [`ROOT`]. All have the same guards unless stated otherwise.
pub(super) struct Tree<'s, 'i> {
    routes: &'s mut RouteBuilder<'i>,
    guards: &'static [RequestGuard],
    /// Names by directory.
    listings: BTreeMap<Cow<'static, str>, Vec<Cow<'static, str>>>,
    /// Leaves and listings whose path is unique to the VM.
    own: BTreeMap<String, String>,
}

impl<'s, 'i> Tree<'s, 'i> {
    pub(super) fn new(routes: &'s mut RouteBuilder<'i>, guards: &'static [RequestGuard]) -> Self {
        Self { routes, guards, listings: BTreeMap::new(), own: BTreeMap::new() }
    }

    /// Returns the guards of the tree.
    pub(super) fn guards(&self) -> &'static [RequestGuard] {
        self.guards
    }

    /// Gives access to the routes, for routes that appear in no listing.
    pub(super) fn routes(&mut self) -> &mut RouteBuilder<'i> {
        self.routes
    }

    /// Adds a leaf of text. An owned path is unique to the VM. It gets no separate route, because a VM has many such
    /// paths and no other VM could share the routes.
    pub(super) fn text(&mut self, path: impl Into<Cow<'static, str>>, text: impl Into<String>) {
        match path.into() {
            Cow::Borrowed(path) => {
                let response = self.routes.found(TEXT, text.into());
                self.leaf(path, response);
            }
            Cow::Owned(path) => {
                let (directory, name) = split(path.clone().into());
                self.list(directory, name);
                self.own.insert(path, text.into());
            }
        }
    }

    /// Adds a leaf, and adds its name to the listings above it.
    pub(super) fn leaf(&mut self, path: impl Into<Cow<'static, str>>, response: Response) {
        let path = path.into();
        let (directory, name) = split(path.clone());
        self.list(directory, name);
        self.routes.guarded(path, self.guards, response);
    }

    /// Adds a leaf of text that no listing has.
    pub(super) fn unlisted(&mut self, path: &'static str, text: String) {
        let response = self.routes.found(TEXT, text);
        self.routes.guarded(path, self.guards, response);
    }

    /// Like [`leaf`](Self::leaf), with guards of its own and answered per request.
    pub(super) fn live(
        &mut self,
        path: &'static str,
        guards: &'static [RequestGuard],
        live: impl LiveRoute + 'static,
    ) {
        let (directory, name) = split(Cow::Borrowed(path));
        self.list(directory, name);
        self.routes.live(path, Methods::READ, guards, live);
    }

    /// Adds a directory with this listing, which replaces the names that its leaves have added.
    pub(super) fn directory(&mut self, path: &'static str, guards: &'static [RequestGuard], listing: String) {
        if self.listings.remove(path).is_none() {
            let (above, name) = split(Cow::Borrowed(path));
            self.list(above, name + "/");
        }
        let response = self.routes.found(TEXT, listing);
        self.routes.guarded(path, guards, response);
    }

    /// Adds a name to the listing of its directory, and that directory to the listings above.
    fn list(&mut self, directory: Cow<'static, str>, name: Cow<'static, str>) {
        if let Some(names) = self.listings.get_mut(directory.as_ref()) {
            names.push(name);
            return;
        }
        if directory != ROOT {
            let (above, own) = split(directory.clone());
            let slash = if above == ROOT { "" } else { "/" };
            self.list(above, own + slash);
        }
        self.listings.insert(directory, vec![name]);
    }

    /// Adds the listings, and a 404 behind the guards for everything else below the root.
    pub(super) fn finish(self) {
        let Self { routes, guards, listings, mut own } = self;
        let mut root = None;
        for (directory, mut names) in listings {
            names.sort_unstable();
            let names = names.join("\n");
            match directory {
                path if path == ROOT => root = Some(routes.found(TEXT, names)),
                Cow::Borrowed(path) => {
                    let listing = routes.found(TEXT, names);
                    routes.guarded(path, guards, listing);
                }
                Cow::Owned(path) => drop(own.insert(path, names)),
            }
        }
        if let Some(listing) = root {
            routes.live_below(ROOT, Methods::READ, guards, Root { listing, own: LeafTable::new(&own) });
        }
    }
}

/// Splits a path into directory and name. Both are static if the path is.
fn split(path: Cow<'static, str>) -> (Cow<'static, str>, Cow<'static, str>) {
    let at = path.rfind('/').expect("paths begin with a slash");
    match path {
        Cow::Borrowed(path) => (path[..at].into(), path[at + 1..].into()),
        Cow::Owned(mut path) => {
            let name = path.split_off(at + 1);
            path.truncate(at);
            (path.into(), name.into())
        }
    }
}

/// Serves the root's listing, the paths that are unique to the VM, and 404 for other paths below. The guards come
/// first, so a request that may not read the tree learns nothing of its content.
#[derive(Debug)]
struct Root {
    listing: Response,
    own: LeafTable,
}

impl LiveRoute for Root {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        if call.rest.is_empty() {
            return self.listing.clone().into();
        }
        match self.own.find(call.rest) {
            Some(text) => Response::new(StatusCode(200), Some(TEXT), &[], text),
            None => Response::error(StatusCode(404), &[]),
        }
        .into()
    }

    fn leaves(&self) -> Vec<(&str, &str)> {
        self.own.iter().collect()
    }

    fn is_lasting(&self) -> bool {
        true
    }

    fn about(&self) -> &'static str {
        "the listing, and leaves of NICs, keys and tags; else 404"
    }
}

/// Paths below [`ROOT`] with their content, one after the other in one text, sorted by path.
struct LeafTable {
    text: Bytes,
    spans: Box<[Span]>,
}

/// Positions in the text: start of the path, start of its content, end of its content.
#[derive(Clone, Copy, Debug)]
struct Span {
    path: u32,
    content: u32,
    end: u32,
}

impl std::fmt::Debug for LeafTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter().map(|(path, _)| path)).finish()
    }
}

impl LeafTable {
    fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        let part = |from: u32, to: u32| {
            std::str::from_utf8(&self.text[from as usize..to as usize]).unwrap_or_default()
        };
        self.spans.iter().map(move |span| (part(span.path, span.content), part(span.content, span.end)))
    }

    fn new(own: &BTreeMap<String, String>) -> Self {
        let mut text = Vec::new();
        let at = |text: &Vec<u8>| u32::try_from(text.len()).expect("a record is smaller than 4 GiB");
        let mut spans = Vec::with_capacity(own.len());
        for (path, content) in own {
            let start = at(&text);
            text.extend_from_slice(path.strip_prefix(ROOT).unwrap_or(path).as_bytes());
            let middle = at(&text);
            text.extend_from_slice(content.as_bytes());
            spans.push(Span { path: start, content: middle, end: at(&text) });
        }
        Self { text: Bytes::copy_from_slice(&text), spans: spans.into() }
    }

    /// Returns the content of a path.
    fn find(&self, path: &str) -> Option<Bytes> {
        let of = |span: &Span| &self.text[span.path as usize..span.content as usize];
        let found = self.spans.binary_search_by(|span| of(span).cmp(path.as_bytes())).ok()?;
        let Span { content, end, .. } = self.spans[found];
        Some(self.text.slice(content as usize..end as usize))
    }
}
