//! Base address registers (BARs). They give the part of a device's memory that its peers can reach.

/// Maximum size of a BAR in bytes. No bus has more than 52 address bits.
const LARGEST_BAR: u64 = 1 << 52;

/// A base address register (BAR) of a PCI function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Bar {
    /// Number of the register: 0 to 5, or 6 for the expansion ROM.
    pub index: u8,
    /// Size of the address range in bytes.
    pub size: u64,
    /// True if the range is memory; false if it is I/O ports.
    pub memory: bool,
    /// True if the register holds 64-bit addresses.
    pub wide: bool,
    /// True if reads of the range have no side effects. Bridges may then prefetch.
    pub prefetchable: bool,
}

const MEMORY: u64 = 0x200;
const PORTS: u64 = 0x100;
const PREFETCH: u64 = 0x2000;
const WIDE: u64 = 0x10_0000;

/// Parses the sysfs file `resource`. Each line has the start, end and flags of one base address
/// register (`linux/ioport.h`). Lines after the six registers and the ROM describe virtual
/// functions and windows of bridges. They are ignored.
pub(super) fn read(text: &str) -> Result<Vec<Bar>, String> {
    let mut bars = Vec::new();
    for (index, line) in text.lines().take(7).enumerate() {
        let mut numbers = line.split_whitespace().map(|word| {
            let digits = word.strip_prefix("0x").unwrap_or("");
            if digits.starts_with('+') { None } else { u64::from_str_radix(digits, 16).ok() }
        });
        let mut next = || {
            numbers
                .next()
                .flatten()
                .ok_or_else(|| format!("not the start, end and flags of a register: {line:.60}"))
        };
        let (start, end, flags) = (next()?, next()?, next()?);
        if flags & (MEMORY | PORTS) == 0 || end == 0 {
            continue;
        }
        let size = end.checked_sub(start).and_then(|size| size.checked_add(1));
        let Some(size) = size.filter(|size| *size <= LARGEST_BAR) else {
            return Err(format!("a register with an impossible range: {line:.60}"));
        };
        bars.push(Bar {
            index: index as u8,
            size,
            memory: flags & MEMORY != 0,
            wide: flags & WIDE != 0,
            prefetchable: flags & PREFETCH != 0,
        });
    }
    Ok(bars)
}

/// Returns the text of a sysfs file `resource` that [`read`] parses as `bars`. The addresses in the
/// text are invented.
pub(super) fn write(bars: &[Bar]) -> String {
    let mut text = String::new();
    for index in 0..7 {
        let (mut start, mut end, mut flags) = (0, 0, 0);
        if let Some(bar) = bars.iter().find(|bar| bar.index == index) {
            let flag = |set: bool, flag: u64| if set { flag } else { 0 };
            (start, end) = (bar.size, 2 * bar.size - 1);
            flags = if bar.memory { MEMORY } else { PORTS };
            flags |= flag(bar.wide, WIDE) | flag(bar.prefetchable, PREFETCH);
        }
        text.push_str(&format!("0x{start:016x} 0x{end:016x} 0x{flags:016x}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn registers_have_the_size_between_start_and_end() {
        let text = "0x0000000040000000 0x000000004007ffff 0x0000000000140204\n\
                    0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
                    0x0000380000000000 0x000039ffffffffff 0x000000000014220c\n";
        let bars = read(text).unwrap();
        assert_eq!(bars.len(), 2);
        assert_eq!((bars[0].size, bars[0].wide, bars[0].prefetchable), (512 << 10, true, false));
        assert_eq!((bars[1].index, bars[1].size, bars[1].prefetchable), (2, 2 << 40, true));
        assert_eq!(read(&write(&bars)).unwrap(), bars);
    }

    #[test]
    fn registers_with_absurd_ranges_are_refused() {
        for wrong in [
            "x",
            "0x5 0x2 0x200",
            "0x0 0xffffffffffffffff 0x200",
            "0x0 0x1",
            "0x+1 0x2 0x200",
            "0x0 0x10000000000000000 0x200",
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    proptest! {
        /// REL-03: the parser of the sysfs file `resource` returns for any text and does not panic.
        #[test]
        fn arbitrary_text_does_not_panic(
            text in ".{0,200}", numbers in "(0x[0-9a-f]{0,17} ?){0,4}\n?",
        ) {
            let _ = read(&text);
            let _ = read(&numbers);
        }
    }
}
