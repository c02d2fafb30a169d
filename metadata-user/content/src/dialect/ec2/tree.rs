//! The tree while it is written: leaves come, listings follow from them.
//!
//! A crawler recurses into names that end in `/` and reads the others, and drops all it has when one of them
//! is not 200. So nothing is listed by hand that is not a route.

use std::borrow::Cow;
use std::collections::BTreeMap;

use bytes::Bytes;

use super::super::sheet::{Sheet, TEXT};
use crate::http::{Response, Status};
use crate::store::{Call, Guard, Live, Methods, Outcome};

/// The root; its children are listed without slashes, as AWS does.
const ROOT: &str = "/latest";

/// The routes under [`ROOT`], all with the same guards unless they say otherwise.
pub(super) struct Tree<'s, 'i> {
    sheet: &'s mut Sheet<'i>,
    guards: &'static [Guard],
    /// Names by directory.
    listings: BTreeMap<Cow<'static, str>, Vec<Cow<'static, str>>>,
    /// Leaves and listings whose path is the VM's own.
    own: BTreeMap<String, String>,
}

impl<'s, 'i> Tree<'s, 'i> {
    pub(super) fn new(sheet: &'s mut Sheet<'i>, guards: &'static [Guard]) -> Self {
        Self { sheet, guards, listings: BTreeMap::new(), own: BTreeMap::new() }
    }

    /// The guards of the tree.
    pub(super) fn guards(&self) -> &'static [Guard] {
        self.guards
    }

    /// For routes that are in no listing.
    pub(super) fn sheet(&mut self) -> &mut Sheet<'i> {
        self.sheet
    }

    /// A leaf of text. Where its path is the VM's own it is no route: a VM has many, and nobody to share them.
    pub(super) fn text(&mut self, path: impl Into<Cow<'static, str>>, text: impl Into<String>) {
        match path.into() {
            Cow::Borrowed(path) => {
                let response = self.sheet.found(TEXT, text.into());
                self.leaf(path, response);
            }
            Cow::Owned(path) => {
                let (directory, name) = split(path.clone().into());
                self.list(directory, name);
                self.own.insert(path, text.into());
            }
        }
    }

    /// A leaf, with its name in its directory and those above.
    pub(super) fn leaf(&mut self, path: impl Into<Cow<'static, str>>, response: Response) {
        let path = path.into();
        let (directory, name) = split(path.clone());
        self.list(directory, name);
        self.sheet.guarded(path, self.guards, response);
    }

    /// A directory whose listing is not simply the names in it.
    pub(super) fn directory(&mut self, path: &'static str, guards: &'static [Guard], listing: String) {
        if self.listings.remove(path).is_none() {
            let (above, name) = split(Cow::Borrowed(path));
            self.list(above, name + "/");
        }
        let response = self.sheet.found(TEXT, listing);
        self.sheet.guarded(path, guards, response);
    }

    /// Lists a name in a directory, and that in those above.
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

    /// Adds the listings, and an answer to what the tree has not: 404 for those who may read it.
    pub(super) fn finish(self) {
        let Self { sheet, guards, listings, mut own } = self;
        let mut root = None;
        for (directory, mut names) in listings {
            names.sort_unstable();
            let names = names.join("\n");
            match directory {
                path if path == ROOT => root = Some(sheet.found(TEXT, names)),
                Cow::Borrowed(path) => {
                    let listing = sheet.found(TEXT, names);
                    sheet.guarded(path, guards, listing);
                }
                Cow::Owned(path) => drop(own.insert(path, names)),
            }
        }
        if let Some(listing) = root {
            sheet.live_below(ROOT, Methods::READ, guards, Root { listing, own: Leaves::new(&own) });
        }
    }
}

/// The directory a path is in, and its name there. Slices of a static path are static.
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

/// The root's listing, what is the VM's own, and 404 for everything below it that has no route: behind the
/// guards, so that who may not read the tree does not learn what is in it.
#[derive(Debug)]
struct Root {
    listing: Response,
    own: Leaves,
}

impl Live for Root {
    fn answer(&self, call: &Call<'_>) -> Outcome {
        if call.rest.is_empty() {
            return self.listing.clone().into();
        }
        match self.own.find(call.rest) {
            Some(text) => Response::new(Status(200), Some(TEXT), &[], text),
            None => Response::error(Status(404), &[]),
        }
        .into()
    }

    fn leaves(&self) -> Vec<(&str, &str)> {
        self.own.iter().collect()
    }

    fn about(&self) -> &'static str {
        "the names in it, what is there of NICs, keys and tags; else 404"
    }
}

/// Paths below [`ROOT`] and what is there, one after the other in one text, by path.
struct Leaves {
    text: Bytes,
    places: Box<[Place]>,
}

/// Where a path begins in the text, where what is said there does, and where that ends.
#[derive(Clone, Copy, Debug)]
struct Place {
    path: u32,
    said: u32,
    end: u32,
}

impl std::fmt::Debug for Leaves {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter().map(|(path, _)| path)).finish()
    }
}

impl Leaves {
    fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        let part = |from: u32, to: u32| {
            std::str::from_utf8(&self.text[from as usize..to as usize]).unwrap_or_default()
        };
        self.places.iter().map(move |place| (part(place.path, place.said), part(place.said, place.end)))
    }

    fn new(own: &BTreeMap<String, String>) -> Self {
        let mut text = Vec::new();
        let at = |text: &Vec<u8>| u32::try_from(text.len()).expect("a record is smaller than 4 GiB");
        let mut places = Vec::with_capacity(own.len());
        for (path, said) in own {
            let start = at(&text);
            text.extend_from_slice(path.strip_prefix(ROOT).unwrap_or(path).as_bytes());
            let middle = at(&text);
            text.extend_from_slice(said.as_bytes());
            places.push(Place { path: start, said: middle, end: at(&text) });
        }
        Self { text: Bytes::copy_from_slice(&text), places: places.into() }
    }

    /// What is at a path.
    fn find(&self, path: &str) -> Option<Bytes> {
        let of = |place: &Place| &self.text[place.path as usize..place.said as usize];
        let found = self.places.binary_search_by(|place| of(place).cmp(path.as_bytes())).ok()?;
        let Place { said, end, .. } = self.places[found];
        Some(self.text.slice(said as usize..end as usize))
    }
}
