// What the page uses of Preact and htm. Elements are not checked: htm's templates are text.
export const html: (parts: TemplateStringsArray, ...values: any[]) => any;
export const render: (element: any, into: Element) => void;
export const useState: <T = any>(first?: T | (() => T)) => [any, (next: any) => void];
export const useRef: <T = any>(first: T) => { current: any };
export const useEffect: (work: () => void | (() => void), when?: any[]) => void;
export const useLayoutEffect: (work: () => void | (() => void), when?: any[]) => void;
export const useMemo: <T>(make: () => T, when: any[]) => T;
export const useCallback: <T>(call: T, when: any[]) => T;
