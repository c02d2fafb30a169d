//! The text of a key file: JSON with the current key, its start time, and the former key.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use super::{KEY_OCTETS, Key, Keys};

/// What precedes the version in the field `form`.
const FORM: &str = "xdp-imds token keys ";

/// Content of the file. It has no `Debug`, because the keys are secret.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    form: String,
    since_unix: u64,
    current: String,
    previous: Option<String>,
}

impl Keys {
    /// The version of the file format.
    pub const VERSION: u32 = 1;

    /// The version of a key file; `None` if the text is not a key file.
    #[must_use]
    pub fn version_of(text: &[u8]) -> Option<u32> {
        #[derive(Deserialize)]
        struct Head<'a> {
            form: &'a str,
        }
        serde_json::from_slice::<Head<'_>>(text).ok()?.form.strip_prefix(FORM)?.parse().ok()
    }

    /// Parses the text of a key file; `None` if it is malformed.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        if Self::version_of(text)? != Self::VERSION {
            return None;
        }
        let text: Text = serde_json::from_slice(text).ok()?;
        let previous = match &text.previous {
            Some(previous) => Some(key(previous)?),
            None => None,
        };
        Some(Self { current: key(&text.current)?, since_unix: text.since_unix, previous })
    }

    /// Returns the text of a key file, which is as secret as the keys.
    #[must_use]
    pub fn text(&self) -> String {
        let text = Text {
            form: format!("{FORM}{}", Self::VERSION),
            since_unix: self.since_unix,
            current: STANDARD.encode(self.current.octets),
            previous: self.previous.as_ref().map(|key| STANDARD.encode(key.octets)),
        };
        serde_json::to_string(&text).expect("strings and numbers are JSON")
    }
}

fn key(text: &str) -> Option<Key> {
    let octets: [u8; KEY_OCTETS] = STANDARD.decode(text).ok()?.try_into().ok()?;
    Some(Key::new(octets))
}
