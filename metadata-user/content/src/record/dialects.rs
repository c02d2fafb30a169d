//! The dialects a record can list, and the SMBIOS stamps provisioning can write. Both come from the table of
//! dialects, `each_dialect!`.

use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

/// The form in which a dialect carries a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carried {
    /// The dialect does not carry the payload.
    Absent,
    /// As octets at a separate path.
    Octets,
    /// As text at a separate path: UTF-8 unchanged, gzip in a MIME part, other octets as empty text.
    Text,
    /// As a string in a JSON or YAML document, in the form of [`Text`](Self::Text).
    InDocument,
    /// As base64 of the octets.
    Base64,
    /// As base64 of the form of [`Text`](Self::Text).
    Base64Text,
    /// In a JSON document, as a string if it is UTF-8 and as base64 otherwise.
    InDocumentOrBase64,
}

impl Carried {
    /// Returns whether octets that are neither UTF-8 nor gzip are lost.
    #[must_use]
    pub fn is_text_only(self) -> bool {
        matches!(self, Self::Text | Self::InDocument | Self::Base64Text)
    }
}

/// Defines [`Dialect`] from the rows of `each_dialect!`.
macro_rules! dialects {
    ($($module:ident: $(
        $variant:ident $name:literal $title:literal $user_data:ident $vendor_data:ident $stamps:tt
    ),+;)+) => {
        /// `serve.dialects`: the dialects a record can list.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, Serialize)]
        #[expect(missing_docs, reason = "each variant is a dialect's name")]
        pub enum Dialect {
            $($(#[serde(rename = $name)] $variant,)+)+
        }

        impl Dialect {
            /// All dialects, in the order of the table.
            pub const ALL: &[Self] = &[$($(Self::$variant),+),+];

            /// Returns the name as records spell it.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self {
                    $($(Self::$variant => $name,)+)+
                }
            }

            /// Returns the name as the cloud spells it.
            #[must_use]
            pub fn title(self) -> &'static str {
                match self {
                    $($(Self::$variant => $title,)+)+
                }
            }

            /// Returns the form in which the dialect carries user-data.
            #[must_use]
            pub fn user_data(self) -> Carried {
                match self {
                    $($(Self::$variant => Carried::$user_data,)+)+
                }
            }

            /// Returns the form in which the dialect carries vendor-data.
            #[must_use]
            pub fn vendor_data(self) -> Carried {
                match self {
                    $($(Self::$variant => Carried::$vendor_data,)+)+
                }
            }

            /// Returns the values of `serve.smbios` with which guests use this dialect.
            fn stamps(self) -> &'static [&'static str] {
                match self {
                    $($(Self::$variant => &$stamps,)+)+
                }
            }
        }
    };
}

each_dialect!(dialects);

static STAMPS: LazyLock<Vec<&'static str>> =
    LazyLock::new(|| Dialect::ALL.iter().flat_map(|dialect| dialect.stamps()).copied().collect());

/// `serve.smbios`: the datasource that provisioning writes into SMBIOS. It does not affect HTTP answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Smbios(&'static str);

impl Smbios {
    /// The default.
    pub const NO_CLOUD: Self = Self("nocloud");

    /// Returns all values, in the order of the table of dialects.
    #[must_use]
    pub fn all() -> &'static [&'static str] {
        &STAMPS
    }

    /// Returns the value as records spell it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        self.0
    }
}

impl Serialize for Smbios {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0)
    }
}

impl<'de> Deserialize<'de> for Smbios {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        use serde::de::Error as _;
        let found = std::borrow::Cow::<str>::deserialize(deserializer)?;
        let known = Self::all().iter().find(|known| **known == found);
        known.map(|known| Self(known)).ok_or_else(|| D::Error::unknown_variant(&found, Self::all()))
    }
}

#[cfg(test)]
mod tests {
    use super::{Dialect, Smbios};
    use std::collections::HashSet;

    #[test]
    fn every_name_in_the_table_is_unique() {
        let unique = |names: Vec<&str>| names.iter().collect::<HashSet<_>>().len() == names.len();
        assert!(unique(Dialect::ALL.iter().map(|dialect| dialect.as_str()).collect()));
        assert!(unique(Dialect::ALL.iter().map(|dialect| dialect.title()).collect()));
        assert!(unique(Smbios::all().to_vec()));
    }

    #[test]
    fn smbios_reads_the_stamps_of_the_table_and_no_other_text() {
        for known in Smbios::all() {
            let read: Smbios = serde_json::from_value((*known).into()).expect("a stamp of the table");
            assert_eq!(read.as_str(), *known);
        }
        assert_eq!(serde_json::to_value(Smbios::NO_CLOUD).expect("text"), "nocloud");
        let refused = serde_json::from_value::<Smbios>("kubevirt".into()).expect_err("kubevirt has no stamp");
        assert!(
            refused.to_string().starts_with("unknown variant `kubevirt`, expected one of `nocloud`"),
            "{refused}"
        );
    }
}
