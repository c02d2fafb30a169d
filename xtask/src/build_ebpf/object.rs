//! What can be read off an eBPF object.

use anyhow::{Context as _, Result, ensure};
use object::{Object as _, ObjectSection as _, ObjectSymbol as _, SymbolKind};

/// Octets of an instruction (RFC 9669 §3).
const INSTRUCTION: u64 = 8;

/// The programs by name, with their length in instructions.
pub(super) fn instructions(object: &[u8]) -> Result<Vec<(String, u64)>> {
    let file = object::File::parse(object).context("the object is no ELF file")?;
    let section = |name| file.section_by_name(name).map(|section| section.index());
    let sections = [section("xdp").context("the object has no section `xdp`")?]
        .into_iter()
        .chain(section("classifier"))
        .collect::<Vec<_>>();
    let programs = file.symbols().filter(|symbol| {
        symbol.kind() == SymbolKind::Text
            && symbol.section_index().is_some_and(|index| sections.contains(&index))
    });
    let mut counted = programs
        .map(|symbol| Ok((symbol.name()?.to_owned(), symbol.size() / INSTRUCTION)))
        .collect::<Result<Vec<_>>>()?;
    ensure!(!counted.is_empty(), "the object has no programs");
    counted.sort();
    Ok(counted)
}

/// Where two objects first differ.
pub(super) fn first_difference(left: &[u8], right: &[u8]) -> usize {
    let common = left.len().min(right.len());
    left.iter().zip(right).position(|(l, r)| l != r).unwrap_or(common)
}

#[cfg(test)]
mod tests {
    use super::{first_difference, instructions};

    #[test]
    fn the_committed_object_has_the_four_programs() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../metadata-ebpf/prebuilt/xdp-imds.bpf.o");
        let object = std::fs::read(path).expect("the object is committed");
        let counted = instructions(&object).expect("it is an object");
        let names: Vec<_> = counted.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["hub", "port", "port_tcx", "socket"]);
        assert!(counted.iter().all(|(_, count)| *count > 0), "{counted:?}");
    }

    #[test]
    fn what_is_no_object_is_refused() {
        assert!(instructions(b"version https://example.org/pointer").is_err());
    }

    #[test]
    fn a_prefix_differs_where_it_ends() {
        assert_eq!(first_difference(b"abc", b"abd"), 2);
        assert_eq!(first_difference(b"abc", b"abcd"), 3);
    }
}
