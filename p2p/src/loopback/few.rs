//! A list that is nearly always one item long and then costs no allocation.

/// None, one, or many items.
#[derive(Debug, Default)]
pub(super) enum Few<T> {
    #[default]
    None,
    One(T),
    Many(Vec<T>),
}

impl<T> Few<T> {
    #[inline]
    pub(super) fn push(&mut self, item: T) {
        match std::mem::take(self) {
            Self::None => *self = Self::One(item),
            Self::One(first) => *self = Self::Many(vec![first, item]),
            Self::Many(mut items) => {
                items.push(item);
                *self = Self::Many(items);
            }
        }
    }

    #[inline]
    pub(super) fn as_slice(&self) -> &[T] {
        match self {
            Self::None => &[],
            Self::One(item) => std::slice::from_ref(item),
            Self::Many(items) => items,
        }
    }

    #[inline]
    pub(super) fn iter(&self) -> std::slice::Iter<'_, T> {
        self.as_slice().iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_come_back_in_order() {
        let mut few = Few::None;
        for n in 0..5 {
            assert_eq!(few.as_slice(), (0..n).collect::<Vec<_>>());
            few.push(n);
        }
    }
}
