//! Which dialect an answer is of, as a small number: what is counted on the packet path indexes an array.

use crate::record::Dialect;

/// A dialect, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Datasource(u8);

impl Datasource {
    /// No route was found: the record serves nothing there.
    pub const NONE: Self = Self(0);
    /// A route of all dialects, such as `/`.
    pub const ANY: Self = Self(1);
    /// A route of a dialect that no record can name.
    const OTHER: Self = Self(2);
    const FIRST: usize = 3;

    /// How many there are.
    pub const COUNT: usize = Self::FIRST + Dialect::ALL.len();

    /// The dialect of a route, by what [`Route::dialect`](super::Route::dialect) calls it.
    #[must_use]
    pub fn named(name: &str) -> Self {
        if name == super::EVERY_DIALECT {
            return Self::ANY;
        }
        let number = Dialect::ALL.iter().position(|dialect| dialect.as_str() == name);
        let number = number.and_then(|number| u8::try_from(Self::FIRST + number).ok());
        number.map_or(Self::OTHER, Self)
    }

    /// Its number, below [`COUNT`](Self::COUNT).
    #[inline]
    #[must_use]
    pub fn index(self) -> usize {
        self.0.into()
    }

    /// All of them, by number.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..=u8::MAX).take(Self::COUNT).map(Self)
    }

    /// Its name in metrics and in the audit log.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::NONE => "none",
            Self::ANY => "any",
            _ => Dialect::ALL.get(self.index().wrapping_sub(Self::FIRST)).map_or("other", |d| d.as_str()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Datasource;
    use crate::record::Dialect;
    use std::collections::HashSet;

    #[test]
    fn every_dialect_has_a_number_and_a_label_of_its_own() {
        let labels: HashSet<_> = Datasource::all().map(Datasource::label).collect();
        assert_eq!(labels.len(), Datasource::COUNT);
        for dialect in Dialect::ALL {
            assert_eq!(Datasource::named(dialect.as_str()).label(), dialect.as_str());
        }
        assert_eq!(Datasource::named("every dialect").label(), "any");
        assert_eq!(Datasource::named("test").label(), "other");
        assert!(Datasource::all().enumerate().all(|(number, datasource)| datasource.index() == number));
    }
}
