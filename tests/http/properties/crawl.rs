//! A client that reads every name that the listings of a tree contain.

use metadata_content::http::{Response, StatusCode};
use metadata_content::store::Host;
use proptest::prelude::*;
use support::question::{Insider, quoted};

/// A depth that no tree reaches.
const DEEPEST: usize = 12;

/// The format of a tree's listings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Listing {
    /// EC2's format: names joined by newlines; `0=name` is a key below `0`.
    Ec2,
    /// GCE's format: one line per name, each ending in a newline.
    Google,
    /// Names joined by newlines, without a newline at the end.
    Plain,
}

/// A tree to be crawled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tree {
    pub(crate) host: Host,
    /// Path of the root, with a slash at its end.
    pub(crate) root: &'static str,
    /// Query that every request needs.
    pub(crate) query: &'static str,
    pub(crate) listing: Listing,
    /// Names that end in a slash although they are lists of values.
    pub(crate) lists: &'static [&'static str],
}

/// A leaf: its name, its path and its answer.
pub(crate) type Leaf = (String, String, Response);

impl Tree {
    /// Reads every listed name, starting at the root; each must exist.
    pub(crate) fn crawl(&self, insider: &Insider<'_>) -> Result<Vec<Leaf>, TestCaseError> {
        let mut leaves = Vec::new();
        self.directory(insider, self.root, 0, &mut leaves)?;
        Ok(leaves)
    }

    fn directory(
        &self,
        insider: &Insider<'_>,
        path: &str,
        depth: usize,
        leaves: &mut Vec<Leaf>,
    ) -> Result<(), TestCaseError> {
        prop_assert!(depth < DEEPEST, "{} is too deep", path);
        let listing = insider.get(self.host, &format!("{path}{}", self.query));
        prop_assert_eq!(listing.status(), StatusCode(200), "{}", path);
        let text = String::from_utf8(listing.body().to_bytes().to_vec()).expect("a listing is text");
        for name in self.names(path, &text)? {
            let quoted = quoted(&name);
            if self.lists.contains(&name.as_str()) {
                let list = insider.get(self.host, &format!("{path}{quoted}{}", self.query));
                prop_assert_eq!(list.status(), StatusCode(200), "{}{}", path, name);
                continue;
            }
            if name.ends_with('/') {
                self.directory(insider, &format!("{path}{quoted}"), depth + 1, leaves)?;
                continue;
            }
            let below = match name.split_once('=') {
                Some((number, _)) if self.listing == Listing::Ec2 && number.parse::<u32>().is_ok() => {
                    format!("{number}/openssh-key")
                }
                _ => quoted,
            };
            let place = format!("{path}{below}");
            let leaf = insider.get(self.host, &format!("{place}{}", self.query));
            // The answer for an expired token asks the client to try again.
            let again = place.contains("/service-accounts/") && leaf.status() == StatusCode(503);
            prop_assert!(leaf.status() == StatusCode(200) || again, "{} is {:?}", place, leaf.status());
            leaves.push((name, place, leaf));
        }
        Ok(())
    }

    fn names(&self, path: &str, text: &str) -> Result<Vec<String>, TestCaseError> {
        let text = match self.listing {
            Listing::Google if text.is_empty() => text,
            Listing::Google => {
                let lines = text.strip_suffix('\n');
                prop_assert!(lines.is_some(), "{} ends without a newline: {:?}", path, text);
                lines.expect("it was just seen")
            }
            Listing::Ec2 | Listing::Plain => text,
        };
        if text.is_empty() {
            return Ok(Vec::new());
        }
        let names: Vec<String> = text.split('\n').map(str::to_owned).collect();
        for (n, name) in names.iter().enumerate() {
            // Clients strip white space around a name, and request a key by its number only.
            let key = self.listing == Listing::Ec2 && name.contains('=');
            prop_assert!(
                !name.is_empty() && (key || name.trim() == name),
                "{:?} is in {} ({:?})",
                name,
                path,
                text
            );
            prop_assert!(!names[..n].contains(name), "{:?} is twice in {}", name, path);
        }
        Ok(names)
    }
}
