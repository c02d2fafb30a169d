//! Reads and rewrites an eBPF object.

use anyhow::{Context as _, Result, ensure};
use object::build::elf::{Builder, SectionData};
use object::elf::SHT_STRTAB;
use object::{Object as _, ObjectSection as _, ObjectSymbol as _, SymbolKind};

/// Bytes of an instruction (RFC 9669 §3).
const INSTRUCTION: u64 = 8;

/// Returns the programs by name, with their length in instructions.
pub(super) fn instructions(object: &[u8]) -> Result<Vec<(String, u64)>> {
    let file = object::File::parse(object).context("the object is not an ELF file")?;
    let section = |name| file.section_by_name(name).map(|section| section.index());
    let sections = [section("xdp").context("the object lacks the section `xdp`")?]
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

/// Returns the object with plain names for its functions. The compiler's names contain a hash of the project's path.
pub(super) fn with_plain_names(object: &[u8]) -> Result<Vec<u8>> {
    let mut builder = Builder::read(object).context("the object is not an ELF file")?;
    for symbol in &mut builder.symbols {
        let plain = std::str::from_utf8(&symbol.name).ok().and_then(|name| {
            let name = rustc_demangle::try_demangle(name).ok()?;
            Some(format!("{name:#}"))
        });
        if let Some(plain) = plain {
            symbol.name = plain.into_bytes().into();
        }
    }
    // LLVM uses one table for the names of sections and of symbols.
    if !builder.sections.iter().any(|section| matches!(section.data, SectionData::SectionString)) {
        let names = builder.sections.add();
        names.name = b".shstrtab"[..].into();
        names.sh_type = SHT_STRTAB;
        names.sh_addralign = 1;
        names.data = SectionData::SectionString;
    }
    let mut renamed = Vec::with_capacity(object.len());
    builder.write(&mut renamed).context("the object cannot be written")?;
    Ok(renamed)
}

/// Returns the offset of the first difference.
pub(super) fn first_difference(left: &[u8], right: &[u8]) -> usize {
    let common = left.len().min(right.len());
    left.iter().zip(right).position(|(l, r)| l != r).unwrap_or(common)
}

#[cfg(test)]
mod tests {
    use super::{first_difference, instructions, with_plain_names};
    use object::{Object as _, ObjectSymbol as _};

    #[test]
    fn the_committed_object_has_its_programs() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../metadata-ebpf/prebuilt/xdp-imds.bpf.o");
        let object = std::fs::read(path).expect("the object is committed");
        let counted = instructions(&object).expect("it is an object");
        let names: Vec<_> = counted.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["hub", "hub_tcx", "port", "port_tcx", "ring", "socket"]);
        assert!(counted.iter().all(|(_, count)| *count > 0), "{counted:?}");
    }

    #[test]
    fn the_committed_object_has_plain_function_names() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../metadata-ebpf/prebuilt/xdp-imds.bpf.o");
        let object = std::fs::read(path).expect("the object is committed");
        let file = object::File::parse(&*object).expect("it is an object");
        let names: Vec<_> = file.symbols().map(|symbol| symbol.name().expect("text").to_owned()).collect();
        assert!(names.iter().any(|name| name.starts_with("xdp_imds::")), "{names:?}");
        assert!(!names.iter().any(|name| name.starts_with("_R")), "{names:?}");
        assert_eq!(with_plain_names(&object).expect("an object"), object, "nothing else changes");
    }

    #[test]
    fn bytes_that_are_not_an_object_are_refused() {
        assert!(with_plain_names(b"no object").is_err());
        assert!(instructions(b"version https://example.org/pointer").is_err());
    }

    #[test]
    fn a_prefix_differs_at_its_end() {
        assert_eq!(first_difference(b"abc", b"abd"), 2);
        assert_eq!(first_difference(b"abc", b"abcd"), 3);
    }
}
